"""Sums that the server cannot take apart: secure aggregation after Bonawitz et al. 2017.

"Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, Figure 4. Every site turns its values
into integers of a ring and adds pads: one that it shares with each other site and that cancels in the sum, and one of
its own. The server removes the remaining pads with shares of their secrets that enough sites reveal. This folder
depends on neither FLARE nor a method; all cryptographic primitives are those of the library ``cryptography``.
"""
