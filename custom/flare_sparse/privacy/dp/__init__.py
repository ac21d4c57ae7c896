"""Differential privacy of a site's training: the mechanism, its accounting, and what a site keeps for both.

The unit is a subject of a site. Every site is a trust domain of its own, with its own secret, ledger and budget.
"""
