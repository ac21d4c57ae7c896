"""Differential privacy, sums that the server cannot take apart, and encryption."""
