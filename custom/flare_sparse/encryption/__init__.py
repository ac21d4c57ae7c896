"""Sums that the server cannot read: CKKS (Cheon et al. 2017) by TenSEAL, on one flat vector of the live values.

The sites share a secret key; the server has none. It multiplies each site's ciphertext by the site's weight and adds
them up; the sites decrypt the sum. Nothing here knows FLARE or a method: bytes of a context come in from outside.
"""

from .ciphers import PRECISION, ServerCipher, SiteCipher
from .contexts import CLIENT_FILE, SERVER_FILE, KeyContexts

__all__ = ["CLIENT_FILE", "PRECISION", "SERVER_FILE", "KeyContexts", "ServerCipher", "SiteCipher"]
