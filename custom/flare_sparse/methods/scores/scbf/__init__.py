"""Scores of SCBF: norms of channel paths, and the groups that a site reveals."""
