"""Proximal operators, ``prox(v) = argmin_x H(x) + ||x - v||^2 / (2 step)``."""

from collections.abc import Sequence

import torch
from torch import Tensor


def compute_group_lasso_prox(v: Tensor, groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Return the prox of ``threshold * sum_g sqrt(|g|) ||v_g||``: each group shrinks towards zero or becomes zero.

    ``v_g <- max(0, 1 - threshold * sqrt(|g|) / ||v_g||) v_g`` (Yuan and Lin 2006), with exact zeros where the norm is
    at most the threshold.

    Args:
        v: ``(P,)``, which is not changed.
        groups: index tensors ``(groups, entries)``, disjoint; all other entries are not penalised.
        threshold: step times the weight of the penalty, at least 0.
    """
    if not threshold or not groups:
        return v
    result = v.clone()
    for indices in groups:
        members = v[indices]
        norms = torch.linalg.vector_norm(members, dim=1, keepdim=True)
        limit = threshold * indices.shape[1] ** 0.5
        # A comparison, not a clamp, so that a group at the limit is exactly zero; clamp_min avoids 0 / 0 in the
        # branch that ``where`` discards.
        factors = torch.where(
            norms > limit, 1 - limit / norms.clamp_min(torch.finfo(v.dtype).tiny), torch.zeros_like(norms)
        )
        result[indices] = members * factors
    return result


def compute_l1_prox(v: Tensor, groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Return the prox of ``threshold * sum |v_i|`` over the entries of the groups: soft thresholding.

    ``v_i <- sign(v_i) max(0, |v_i| - threshold)``, with exact zeros at or below the threshold.

    Args:
        v: ``(P,)``, which is not changed.
        groups: index tensors of the penalised entries, disjoint.
        threshold: step times the weight of the penalty, at least 0.
    """
    result = v.clone()
    for indices in groups:
        result[indices] = torch.nn.functional.softshrink(v[indices], threshold)
    return result
