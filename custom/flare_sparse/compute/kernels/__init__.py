"""Sparse computation on CPUs: 3D convolutions whose cost follows the live weights."""
