"""Pruning of idle units by the server, after rounds of training (Shao et al. 2020, section 3.3).

A unit is idle by APoZ, the average percentage of zeros after its ReLU (Hu et al. 2016):

    APoZ_c = sum over examples k and positions j of [O_c,j(k) = 0], over examples * positions

Sites count and the server divides, so the result is exactly the APoZ of the pooled examples (docs/algorithms.md,
section 3.8). A count travels as three integers in entries of its unit: the zeros, split into a high and a low part
because float32 represents integers exactly only up to 2 ** 24, and the outputs per example.
"""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Final, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from ...compute.structure.graph import Untraceable, build_channel_graph
from ...compute.structure.removal import (
    RemovableLayer,
    build_live_mask,
    find_removable_layers,
    get_kept_units,
    locate_unit_entries,
)
from ...core.errors import ConfigError
from ...core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ...core.mask import Mask
from ...core.needs import Need, Needs
from ...core.params import Layout
from ...training import Site
from ..method import TRAIN, MethodConfig, broadcast
from .selective import WHOLE_UNITS, SelectiveMethod, SelectiveState

COUNT: Final = "count"
"""The kind of the request, and the phase, in which sites count the zeros of every unit."""


class PruningConfig(MethodConfig):
    """Settings of the pruning at the server."""

    pruning_rate: float = Field(0.1, gt=0, lt=1)
    """theta: share of the remaining units that a pruning removes"""
    prunings: int = Field(6, ge=0)
    """number of prunings, one after each round of training"""
    target_pruned_fraction: float | None = Field(None, ge=0, lt=1)
    """theta_total, instead of prunings: prune while the pruned share is below it"""
    min_units_left: float = Field(0.05, ge=0, lt=1)
    """share of its units that every layer keeps; at least one unit"""

    def needs(self) -> Needs:
        # As a set with the default needs: the settings of SCBF's rounds may be a base beside this one.
        needs = super().needs() | {WHOLE_UNITS, Need.PACKAGE_STEPS.because("sites count how often each unit is zero")}
        if not self.is_due(self.count_prunings(self.rounds)):
            return needs
        return needs | {
            Need.NUMBER_OF_ROUNDS.because(
                f"no pruning follows the last round, but one follows round {self.rounds} of a longer run: pruning was "
                "not complete"
            )
        }

    def count_prunings(self, t: int) -> int:
        """Return the number of prunings before round ``t``."""
        prunings = 0
        for _ in range(1, t):
            prunings += self.is_due(prunings)
        return prunings

    def is_due(self, prunings_done: int) -> bool:
        """Return whether another pruning follows ``prunings_done`` ones.

        It does while the pruned fraction is strictly below the target (docs/algorithms.md, section 3.12, deviation 8).
        """
        if self.target_pruned_fraction is None:
            return prunings_done < self.prunings
        return 1 - (1 - self.pruning_rate) ** prunings_done < self.target_pruned_fraction - 1e-9

    def count_remaining(self, units: int, prunings_done: int) -> int:
        """Return the number of units after ``prunings_done`` prunings.

        docs/algorithms.md, section 3.12, deviation 9.
        """
        return round(units * (1 - self.pruning_rate) ** prunings_done)


PruningConfigT = TypeVar("PruningConfigT", bound=PruningConfig)


class PruningMethod(SelectiveMethod[PruningConfigT]):
    """A selective method whose server removes the units that are zero most often (APoZ).

    While pruning is due, a second request follows each round of training: sites count how often each unit was zero.
    Then the server removes units. Sites train the smaller network and messages carry its entries only. The structure
    travels once, as the mask of live entries; a site that joins later receives it with the model.

    Raises:
        ConfigError: the network has no units to remove.
    """

    round_kinds = frozenset({COUNT, TRAIN})
    score_kinds = frozenset({COUNT})

    def __init__(self, config: PruningConfigT, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        try:
            self.layers = find_removable_layers(build_channel_graph(layout))
        except Untraceable as error:
            raise ConfigError(
                f"method {self.name} removes units along the layers of a network, and {error}; choose another method"
            ) from error
        if not self.layers:
            raise ConfigError(f"method {self.name}: the network has no hidden layer with a ReLU to remove units from")

    def ask(self, state: SelectiveState, sites: Sequence[str]) -> dict[str, Assignment]:
        if state.phase == COUNT:
            model = self.model(state)
            assignment = Assignment(
                Request(COUNT, state.round - 1, model, state.live),
                UpdateSpec("scores", mask=self._count_mask, min_value=0.0),
            )
            return broadcast(sites, assignment)
        assignment = self.build_assignment(TRAIN, state)
        if state.phase == "counted":
            # The sites counted the zeros of this model, so they hold its values; only the structure is new.
            structure = replace(Patch.empty(self.layout.size), base="previous")
            assignment = replace(assignment, request=replace(assignment.request, model=structure))
        return broadcast(self.select_sites(state, sites), assignment)

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != COUNT:
            return super().answer(request, site)
        counts = count_zeros(site, site.weights, self.layers)
        return Update(encode_counts(counts, self._count_entries, self.layout.size), "scores", site.num_examples)

    def learn(self, state: SelectiveState, contributions: Sequence[Contribution]) -> SelectiveState:
        if state.phase == COUNT:
            return self._prune(state, contributions)
        is_due = self.config.is_due(state.prunings) and state.round < self.config.rounds
        return replace(super().learn(state, contributions), phase=COUNT if is_due else "train")

    def _prune(self, state: SelectiveState, contributions: Sequence[Contribution]) -> SelectiveState:
        """Remove the units with the highest APoZ."""
        units = get_kept_units(self.layout, self.layers, state.live)
        remaining = sum(int(layer.sum()) for layer in units)
        surplus = remaining - self.config.count_remaining(self.num_units, state.prunings + 1)
        live_units = remove_idle_units(
            units,
            pool_apoz(contributions, self._count_entries),
            max(surplus, 0),
            at_least=self.config.min_units_left,
        )
        live = build_live_mask(self.layout, self.layers, live_units)
        weights = torch.where(live.bits, state.weights, 0.0)
        held = None if state.held is None else torch.where(live.bits, state.held, 0.0)
        pruned = replace(state, weights=weights, held=held, live=live)
        return replace(pruned, prunings=state.prunings + 1, phase="counted")

    def sends_initial_model(self, kind: str, t: int) -> bool:
        # Units are counted after a round of training.
        return kind != COUNT and super().sends_initial_model(kind, t)

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        """Return the fewest live entries in round ``t``, and all entries.

        Which units are removed is not known. Together they hold at most the sum of the entries of the largest units.
        """
        removed = self.num_units - self.config.count_remaining(
            self.num_units, self.config.count_prunings(min(t, self.config.rounds))
        )
        most_removed = sum(self._removable_sizes[:removed])
        return max(self.layout.size - most_removed, 0), self.layout.size

    @cached_property
    def _removable_sizes(self) -> list[int]:
        """Numbers of entries that units take part in, for each unit that may go; largest first."""
        every = [torch.ones(layer.units, dtype=torch.bool) for layer in self.layers]
        sizes: list[int] = []
        for number, layer in enumerate(self.layers):
            rest = [mask.clone() for mask in every]
            rest[number][0] = False
            size = self.layout.size - build_live_mask(self.layout, self.layers, rest).count
            sizes += [size] * (layer.units - max(1, round(self.config.min_units_left * layer.units)))
        return sorted(sizes, reverse=True)

    @property
    def num_units(self) -> int:
        """Number of removable units of the unpruned network."""
        return sum(layer.units for layer in self.layers)

    @cached_property
    def _count_entries(self) -> Tensor:
        """Indices ``(units, 3)`` of the entries that a unit's count travels in."""
        return locate_counts(self.layout, self.layers)

    @cached_property
    def _count_mask(self) -> Mask:
        bits = torch.zeros(self.layout.size, dtype=torch.bool)
        bits[self._count_entries] = True
        return Mask(bits)

    def describe(self, state: SelectiveState | None = None) -> str:
        return f"{self.num_units} units of {len(self.layers)} layers can be removed" if state is None else ""


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
