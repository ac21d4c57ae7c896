"""scores/scbf."""
