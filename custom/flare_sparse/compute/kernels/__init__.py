"""Sparse computation on CPUs: convolutions and linear layers whose cost follows the live weights."""
