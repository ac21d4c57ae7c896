"""Weights whose tensor is zero in the initial model, such as ``B`` of a low-rank adapter ``B A``.

Their magnitude and their saliency say nothing at the start (docs/algorithms.md, 2.7, deviation 8; 5.7, deviation 10).
"""

from torch import Tensor

from ...core.params import MASKABLE, Layout


def find_zero_weights(layout: Layout, weights: Tensor, preset: str) -> tuple[str, ...]:
    """Return the names of the maskable weights of ``preset`` whose tensors are zero in ``weights`` ``(P,)``."""
    tensors = layout.unflatten(weights)
    maskable = (spec for spec in layout.tensors if spec.role in MASKABLE[preset])
    # A bias at zero blocks no gradient: it is pruned as the papers do.
    return tuple(s.name for s in maskable if s.role in ("weight", "other") and not tensors[s.name].any())
