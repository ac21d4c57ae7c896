"""What becomes of a run: result folders, reports, attacks, evidence."""
