"""Connection sensitivity ``|w * dL/dw|`` (SNIP, Lee et al. 2019; NeuroSFL Eqs. 4 and 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..training.site import Site


def compute_saliency(
    site: Site, weights: Tensor, *, batch_size: int, batches: int | None, t: int, signed: bool = False
) -> Tensor:
    """Mean over minibatches of ``|w * g|`` ``(P,)``, which equals ``|dL/dc|`` at ``c = 1`` for ``L(w (.) c)``.

    Averaging over several minibatches is one of the two readings of IterSNIP (ALGORITHMS 4.4 #11).

    Args:
        site: computes the gradients g on its own examples.
        weights: ``(P,)`` theta.
        batch_size: examples per minibatch.
        batches: how many minibatches; None: all training examples once.
        t: names the random minibatches.
        signed: keep the sign, ``w * mean(g)``: summed over sites this is SNIP of the pooled loss.
    """
    total, count = torch.zeros_like(weights), 0
    for gradient in site.compute_gradients(weights, batch_size, batches, t):
        term = gradient.mul_(weights)
        total += term if signed else term.abs_()
        count += 1
    return total / max(count, 1)


def compute_keep_counts(total: int, keep: int, steps: int, *, exponential: bool = True) -> list[int]:
    """Live counts ``k_1 > ... > k_T' = keep`` of progressive IterSNIP (NeuroSFL 3.1.2; De Jorge et al. 2021).

    Exponential: ``k_j = round(total^(1 - j/T') * keep^(j/T'))``; linear: ``round(total - (total - keep) * j / T')``.
    """
    shares = [j / steps for j in range(1, steps + 1)]
    if exponential and keep > 0:
        counts = [round(total ** (1 - x) * keep**x) for x in shares]
    else:
        counts = [round(total - (total - keep) * x) for x in shares]
    return [*counts[:-1], keep]
