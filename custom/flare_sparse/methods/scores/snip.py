"""Connection sensitivity ``|w * dL/dw|`` (SNIP, Lee et al. 2019; NeuroSFL Eqs. 4 and 5)."""

from collections.abc import Iterable

import torch
from torch import Tensor


def compute_saliency(gradients: Iterable[tuple[Tensor, float]], factors: Tensor) -> Tensor:
    """Compute the mean of ``|w * g|`` over the gradients of minibatches, each weighted by its examples, ``(P,)``.

    It equals ``|dL/dc|`` at ``c = 1`` of the loss ``L(w (.) c)``. The mean over several minibatches is one of two
    readings of IterSNIP (docs/algorithms.md, section 5.4).

    Args:
        gradients: ``(P,)`` gradients ``g``, which are overwritten, and their weights.
        factors: ``(P,)`` weights ``w``, or what stands in their place.
    """
    return average_gradients(((g.mul_(factors.to(g.device)).abs_(), weight) for g, weight in gradients), len(factors))


def average_gradients(gradients: Iterable[tuple[Tensor, float]], size: int) -> Tensor:
    """Return the mean ``(P,)`` of the gradients of minibatches by their weights; zeros where there is none."""
    total, total_weight = torch.zeros(size), 0.0
    # The last minibatch of a pass may be smaller. Counted in full, its examples would weigh more than the others.
    for gradient, batch_weight in gradients:
        total = total.to(gradient.device)
        total.add_(gradient, alpha=batch_weight)
        total_weight += batch_weight
    # The largest minibatch has weight 1: the sum is below 1 only for a site without examples.
    return total / max(total_weight, 1)


def compute_keep_counts(total: int, keep: int, steps: int) -> list[int]:
    """Return the live counts ``k_1 > ... > k_T' = keep`` of progressive IterSNIP (NeuroSFL, section 3.1.2).

    They fall exponentially (De Jorge et al. 2021): ``k_j = round(total^(1 - j/T') * keep^(j/T'))``.

    Args:
        total: number of entries before pruning.
        keep: number of live entries after the last step.
        steps: number of steps ``T'``.
    """
    counts = [round(total ** (1 - j / steps) * keep ** (j / steps)) for j in range(1, steps)]
    # The last power may be off by rounding; the final count must be exact.
    return [*counts, keep]
