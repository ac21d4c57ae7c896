"""Connection sensitivity ``|w * dL/dw|`` (SNIP, Lee et al. 2019; NeuroSFL Eqs. 4 and 5)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from ...core.mask import Mask
from ...training import TrainingConfig
from ...training.site import Site


def compute_saliency(
    site: Site, weights: Tensor, *, batch_size: int, batches: int | None, t: int, factors: Tensor | None = None
) -> Tensor:
    """Compute the mean of ``|w * g|`` over minibatches, each weighted by its number of examples, ``(P,)``.

    It equals ``|dL/dc|`` at ``c = 1`` of the loss ``L(w (.) c)``. The mean over several minibatches is one of two
    readings of IterSNIP (docs/algorithms.md, section 5.4).

    Args:
        site: computes the gradients ``g`` on its own training examples.
        weights: ``(P,)`` weights ``w``.
        batch_size: examples per minibatch.
        batches: number of minibatches; None for one pass over the training examples.
        t: label of the stream of random minibatches.
        factors: ``(P,)`` in place of ``w`` before ``g``; None: ``w``.
    """
    gradients = site.trainer.compute_gradients(weights, batch_size, batches, t)
    return average_saliency(gradients, weights if factors is None else factors)


def average_saliency(gradients: Iterable[tuple[Tensor, float]], factors: Tensor) -> Tensor:
    """Return the mean of ``|factors * g|`` ``(P,)`` over gradients, which are overwritten, by their weights."""
    total, total_weight = torch.zeros_like(factors), 0.0
    # The last minibatch of a pass may be smaller. Counted in full, its examples would weigh more than the others.
    for gradient, batch_weight in gradients:
        total, factors = total.to(gradient.device), factors.to(gradient.device)
        total.add_(gradient.mul_(factors).abs_(), alpha=batch_weight)
        total_weight += batch_weight
    return total / max(total_weight, 1)


def compute_private_saliency(
    site: Site,
    weights: Tensor,
    scored: Mask,
    training: TrainingConfig,
    lots: int | None,
    *,
    factors: Tensor | None = None,
) -> Tensor:
    """Compute ``|w * g|`` of a noisy mean gradient ``g``, ``(P,)``, with differential privacy.

    Each subject's gradient is clipped over the scored entries, and the subjects are charged. What follows, such as the
    mask, is post-processing. All lots have one mean, inside the absolute value: the mean of absolute noise is no zero.

    Args:
        site: computes the gradient on its own training examples.
        weights: ``(P,)`` weights ``w``, which the server knows.
        scored: entries with a score; the others' scores are zero.
        training: its ``batch_size`` and ``accumulate`` are the expected number of subjects in a lot.
        lots: number of lots; None: as many as one pass has.
        factors: ``(P,)`` in place of ``w`` before ``g``; None: ``w``.
    """
    gradient = site.trainer.compute_private_gradient(weights, scored, training, lots)
    return gradient.mul_(weights if factors is None else factors).abs_()


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
