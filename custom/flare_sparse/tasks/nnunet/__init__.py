"""nnU-Net over several sites: its raw data, its fingerprint and plan, its training and inference."""
