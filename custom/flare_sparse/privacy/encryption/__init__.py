"""Aggregation of encrypted values: CKKS (Cheon et al. 2017) through TenSEAL, on one flat vector of the live values.

The sites share a secret key that the server does not have. The server multiplies each site's ciphertexts by the site's
weight and sums them; the sites decrypt the sum. This folder depends on neither FLARE nor a method: it receives TenSEAL
contexts as bytes.
"""

from .ciphers import PRECISION, ServerCipher, SiteCipher
from .contexts import CLIENT_FILE, SERVER_FILE, KeyContexts

__all__ = ["CLIENT_FILE", "PRECISION", "SERVER_FILE", "KeyContexts", "ServerCipher", "SiteCipher"]
