"""APoZ, the average percentage of zeros of a unit after its ReLU (SCBF, section 3.3; Hu et al. 2016).

    APoZ_c = sum over examples k and positions j of [O_c,j(k) = 0], over examples * positions

Sites count, the server divides: the sum of zeros over the sum of outputs is the APoZ of the pooled examples, exactly
(ALGORITHMS 2.4 #11). A count travels as whole numbers in three entries of its unit, since float32 holds whole numbers
only up to 2 ** 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from ...errors import ConfigError
from ...exchange import Contribution, Patch
from ...mask import Mask
from ...params import Layout
from ...structure.removal import RemovableLayer, locate_unit_entries
from ...training.site import Site

WHOLE = 2**24
"""float32 holds every whole number below it."""


def count_zeros(site: Site, weights: Tensor, layers: Sequence[RemovableLayer]) -> Tensor:
    """Zeros of every unit over all training examples, and outputs per example; dropout is off.

    Args:
        site: has the examples.
        weights: ``(P,)``.
        layers: removable layers.

    Returns:
        int64 ``(units of all layers, 2)``.
    """
    counts = [torch.zeros(layer.units, 2, dtype=torch.int64) for layer in layers]
    place = {node: number for number, layer in enumerate(layers) for node in layer.rectified}

    def see(node: str, outputs: Tensor) -> None:
        number = place[node]
        by_unit = outputs.reshape(len(outputs), layers[number].units, -1)
        counts[number][:, 0] += (by_unit == 0).sum((0, 2)).cpu()
        counts[number][:, 1] = by_unit.shape[2] * len(layers[number].rectified)

    site.observe_units(weights, list(place), see)
    return torch.cat(counts)


def locate_counts(layout: Layout, layers: Sequence[RemovableLayer]) -> Tensor:
    """The three entries of each unit that its count travels in, ``(units of all layers, 3)``.

    Raises:
        ConfigError: a unit has fewer entries of its own.
    """
    own = [locate_unit_entries(layout, layer) for layer in layers]
    if thin := [layer.module for layer, entries in zip(layers, own, strict=True) if entries.shape[1] < 3]:
        raise ConfigError(f"pruning by APoZ needs units with three weights of their own; layer {thin[0]!r} has fewer")
    return torch.cat([entries[:, :3] for entries in own])


def encode_counts(counts: Tensor, at: Tensor, size: int) -> Patch:
    """Counts as a patch of ``size`` entries, at the :func:`locate_counts` ``at``."""
    vector, on = torch.zeros(size), torch.zeros(size, dtype=torch.bool)
    zeros, outputs = counts.unbind(1)
    vector[at] = torch.stack([zeros // WHOLE, zeros % WHOLE, outputs], 1).float()
    on[at] = True
    return Patch.from_vector(vector, Mask(on))


def pool_apoz(updates: Sequence[Contribution], at: Tensor) -> list[Fraction]:
    """APoZ of every unit over the examples of all sites, exact; 0 where nothing was counted.

    The mean of the sites' own shares of zeros, each within 0 and 1, weighted by their examples as they count. That is the
    share over all examples where the sites have as many outputs for each; how many a site claims gives it no weight.

    Args:
        updates: with the patches of :func:`encode_counts`.
        at: as there.
    """
    idle, weight = [Fraction(0)] * len(at), [0] * len(at)
    for update in updates:
        high, low, each = update.patch.to_vector()[at].round().long().clamp_(min=0).unbind(1)
        for unit, (a, b, positions) in enumerate(zip(high.tolist(), low.tolist(), each.tolist(), strict=True)):
            if total := positions * update.reported_examples:
                idle[unit] += update.num_examples * Fraction(min(a * WHOLE + b, total), total)
                weight[unit] += update.num_examples
    return [share / n if n else Fraction(0) for share, n in zip(idle, weight, strict=True)]


def remove_idle_units(
    kept: Sequence[Tensor], apoz: Sequence[Fraction], remove: int, *, at_least: float, per_layer: bool
) -> list[Tensor]:
    """The units that are left when the ``remove`` idlest go: highest APoZ first, ties by layer, then by index.

    Args:
        kept: bool ``(units,)`` for each layer, as they are.
        apoz: of every unit of all layers.
        remove: how many go; fewer if the layers' minimum forbids it.
        at_least: share of a layer's first units that it keeps, one unit at the least.
        per_layer: each layer loses its share of them, instead of one ranking over all.
    """
    left = [units.clone() for units in kept]
    floors = [max(1, round(at_least * len(units))) for units in kept]
    first = [sum(len(units) for units in kept[:number]) for number in range(len(kept))]
    for pool, quota in _pools(kept, remove, per_layer=per_layer):
        units = [(number, unit) for number in pool for unit in torch.nonzero(kept[number]).flatten().tolist()]
        ranked = sorted((-apoz[first[number] + unit], number, unit) for number, unit in units)
        gone = 0
        for _, number, unit in ranked:
            if gone < quota and int(left[number].sum()) > floors[number]:
                left[number][unit] = False
                gone += 1
    return left


def _pools(kept: Sequence[Tensor], remove: int, *, per_layer: bool) -> list[tuple[list[int], int]]:
    """Which layers are ranked together, and how many units they lose."""
    if not per_layer:
        return [(list(range(len(kept))), remove)]
    live = [int(units.sum()) for units in kept]
    ends = [round(remove * sum(live[: number + 1]) / max(sum(live), 1)) for number in range(len(live))]
    return [([number], end - start) for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
