"""APoZ, the average percentage of zeros of a unit after its ReLU (SCBF, section 3.3; Hu et al. 2016).

    APoZ_c = sum over examples k and positions j of [O_c,j(k) = 0], over examples * positions

Sites count and the server divides, so the result is exactly the APoZ of the pooled examples (docs/algorithms.md,
section 3.8). A count travels as three integers in entries of its unit: the zeros, split into a high and a low part
because float32 represents integers exactly only up to 2 ** 24, and the outputs per example.
"""

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from ....compute.structure.removal import RemovableLayer, locate_unit_entries
from ....core.errors import ConfigError
from ....core.exchange import Contribution, Patch
from ....core.mask import Mask
from ....core.params import Layout
from ....training.site import Site

MAX_EXACT_INTEGER = 2**24
"""float32 represents every integer up to it exactly."""


def count_zeros(site: Site, weights: Tensor, layers: Sequence[RemovableLayer]) -> Tensor:
    """Count the zeros of every unit over all training examples, with dropout off.

    Args:
        site: the site whose examples are counted over.
        weights: ``(P,)``.
        layers: removable layers.

    Returns:
        int64 ``(units of all layers, 2)``: zeros over all examples, and outputs per example.
    """
    counts = [torch.zeros(layer.units, 2, dtype=torch.int64) for layer in layers]
    layer_of_node = {node: number for number, layer in enumerate(layers) for node in layer.rectified}

    def add_zeros(node: str, outputs: Tensor) -> None:
        number = layer_of_node[node]
        by_unit = outputs.reshape(len(outputs), layers[number].units, -1)
        counts[number][:, 0] += (by_unit == 0).sum((0, 2)).cpu()
        counts[number][:, 1] = by_unit.shape[2] * len(layers[number].rectified)

    site.trainer.observe_units(weights, list(layer_of_node), add_zeros)
    return torch.cat(counts)


def locate_counts(layout: Layout, layers: Sequence[RemovableLayer]) -> Tensor:
    """Return the positions of the three entries of each unit that carry its count, ``(units of all layers, 3)``.

    Raises:
        ConfigError: a unit has fewer than three entries.
    """
    entries_by_layer = [locate_unit_entries(layout, layer) for layer in layers]
    too_few = [layer.module for layer, entries in zip(layers, entries_by_layer, strict=True) if entries.shape[1] < 3]
    if too_few:
        raise ConfigError(
            f"pruning by APoZ needs units with at least three weights of their own; layer {too_few[0]!r} has fewer"
        )
    return torch.cat([entries[:, :3] for entries in entries_by_layer])


def encode_counts(counts: Tensor, positions: Tensor, size: int) -> Patch:
    """Encode counts as a patch of a vector of ``size`` entries, at the ``positions`` of :func:`locate_counts`."""
    vector, bits = torch.zeros(size), torch.zeros(size, dtype=torch.bool)
    zeros, outputs = counts.unbind(1)
    vector[positions] = torch.stack([zeros // MAX_EXACT_INTEGER, zeros % MAX_EXACT_INTEGER, outputs], 1).float()
    bits[positions] = True
    return Patch.from_vector(vector, Mask(bits))


def pool_apoz(contributions: Sequence[Contribution], positions: Tensor) -> list[Fraction]:
    """Return the APoZ of every unit over the examples of all sites, exact; 0 where nothing was counted.

    It is the mean of the sites' shares of zeros, weighted by their numbers of examples as the server counts them. If
    all sites have the same number of outputs per example, that equals the share over the pooled examples.

    Args:
        contributions: contributions with the patches of :func:`encode_counts`.
        positions: positions of the counts.
    """
    sums, weights = [Fraction(0)] * len(positions), [0] * len(positions)
    for contribution in contributions:
        # Counts are untrusted: negative ones become 0 and the share of zeros is capped at 1. A site is weighted by
        # num_examples, so inflating the number of outputs gains it no influence.
        high, low, outputs = contribution.patch.to_vector()[positions].round().long().clamp_(min=0).unbind(1)
        for unit, (hi, lo, n) in enumerate(zip(high.tolist(), low.tolist(), outputs.tolist(), strict=True)):
            if total := n * contribution.reported_examples:
                sums[unit] += contribution.num_examples * Fraction(min(hi * MAX_EXACT_INTEGER + lo, total), total)
                weights[unit] += contribution.num_examples
    # Fractions, because the ranking of units must not depend on the order of sites.
    return [share / weight if weight else Fraction(0) for share, weight in zip(sums, weights, strict=True)]


def remove_idle_units(
    kept: Sequence[Tensor], apoz: Sequence[Fraction], remove: int, *, at_least: float
) -> list[Tensor]:
    """Remove the units with the highest APoZ of all layers, ties by layer, then by index; return the remaining units.

    Args:
        kept: bool ``(units,)`` for each layer: units that have not been removed so far.
        apoz: APoZ of every unit of all layers.
        remove: number of units to remove; fewer if the layers' minimum forbids it.
        at_least: share of a layer's initial units that it keeps, one unit at least.
    """
    remaining = [units.clone() for units in kept]
    minimums = [max(1, round(at_least * len(units))) for units in kept]
    units = [(number, unit) for number, layer in enumerate(kept) for unit in range(len(layer))]
    live = [(-share, *place) for share, place in zip(apoz, units, strict=True) if kept[place[0]][place[1]]]
    removed = 0
    for _, number, unit in sorted(live):
        if removed < remove and int(remaining[number].sum()) > minimums[number]:
            remaining[number][unit] = False
            removed += 1
    return remaining
