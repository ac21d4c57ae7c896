"""Scores of SCBF: norms of channel paths, the groups that a site reveals, and APoZ of units."""
