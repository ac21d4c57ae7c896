"""Scores that methods select entries by: one module for each paper."""
