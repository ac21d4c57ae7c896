"""Sparse computation and the structure of networks."""

from typing import Literal

Compute = Literal["auto", "dense", "sparse"]
"""How a CPU computes a network: by sparse kernels where these are faster, as torch, or by kernels or not at all."""
