"""Differential privacy, and sums that the server cannot take apart."""
