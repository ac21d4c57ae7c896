"""Proximal operators: ``prox(v) = argmin_x H(x) + ||x - v||^2 / (2 step)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_lasso(v: Tensor, groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Prox of ``threshold * sum_g sqrt(|g|) ||v_g||``: each group shrinks towards zero as a whole, or becomes zero.

    ``v_g <- max(0, 1 - threshold * sqrt(|g|) / ||v_g||) v_g`` (Yuan and Lin 2006); exact zeros where the norm is not
    above the threshold.

    Args:
        v: ``(P,)``; left as it is.
        groups: index tensors ``(groups, entries)``, disjoint; all other entries are not penalised.
        threshold: step times the weight of the penalty, at least 0.
    """
    if not threshold or not groups:
        return v
    out = v.clone()
    for indices in groups:
        members = v[indices]
        norms = torch.linalg.vector_norm(members, dim=1, keepdim=True)
        limit = threshold * indices.shape[1] ** 0.5
        kept = torch.where(
            norms > limit, 1 - limit / norms.clamp_min(torch.finfo(v.dtype).tiny), torch.zeros_like(norms)
        )
        out[indices] = members * kept
    return out
