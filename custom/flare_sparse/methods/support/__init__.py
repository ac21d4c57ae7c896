"""methods/support."""
