"""Sparse computation and the structure of networks."""
