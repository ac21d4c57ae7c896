"""Pruning of idle units by the server, after rounds of training (Shao et al. 2020, section 3.3).

A unit is idle by APoZ, the average percentage of zeros after its ReLU (Hu et al. 2016):

    APoZ_c = sum over examples k and positions j of [O_c,j(k) = 0], over examples * positions

Each site sends its own, and their mean by examples is that of the pooled examples (docs/algorithms.md, section 3.8). It
travels in the first entry of its unit.
"""

from collections.abc import Sequence
from dataclasses import replace
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
from ..aggregation.weighted import weigh_by_examples, weighted_sum
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
        # Add to the needs of the next base: the settings of SCBF's rounds may be a base beside this one.
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
                UpdateSpec(
                    "scores", self._count_mask, min_value=0.0, is_valid=lambda p, _: bool((p.values <= 1).all())
                ),
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
        vector = torch.zeros(self.layout.size)
        vector[self._count_entries] = measure_apoz(site, site.weights, self.layers)
        return Update(Patch.from_vector(vector, self._count_mask), "scores", site.num_examples)

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
            weighted_sum(contributions, weigh_by_examples)[self._count_entries].tolist(),
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
        """Indices ``(units,)`` of the entries that a unit's share of zeros travels in."""
        return torch.cat([locate_unit_entries(self.layout, layer)[:, 0] for layer in self.layers])

    @cached_property
    def _count_mask(self) -> Mask:
        return Mask.from_positions(self._count_entries.sort().values, self.layout.size)

    def describe(self, state: SelectiveState | None = None) -> str:
        return f"{self.num_units} units of {len(self.layers)} layers can be removed" if state is None else ""


def measure_apoz(site: Site, weights: Tensor, layers: Sequence[RemovableLayer]) -> Tensor:
    """Return the APoZ of every unit of all layers, float32, over all training examples, with dropout off.

    Args:
        site: the site whose examples are counted over.
        weights: ``(P,)``.
        layers: removable layers.
    """
    # Whole numbers: a sum of float32 is exact only up to 2 ** 24.
    zeros, outputs = ([torch.zeros(layer.units, dtype=torch.int64) for layer in layers] for _ in range(2))
    layer_of_node = {node: number for number, layer in enumerate(layers) for node in layer.rectified}

    def add_zeros(node: str, values: Tensor) -> None:
        number = layer_of_node[node]
        by_unit = values.reshape(len(values), layers[number].units, -1)
        zeros[number] += (by_unit == 0).sum((0, 2)).cpu()
        outputs[number] += by_unit[:, 0].numel()

    site.trainer.observe_units(weights, list(layer_of_node), add_zeros)
    return (torch.cat(zeros).double() / torch.cat(outputs).clamp_min(1)).float()


def remove_idle_units(kept: Sequence[Tensor], apoz: Sequence[float], remove: int, *, at_least: float) -> list[Tensor]:
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
