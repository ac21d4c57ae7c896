"""Pruning of idle units by the server, after rounds of training (Shao et al. 2020, section 3.3).

See docs/algorithms.md, section 3.8.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from ...compute.structure import build_channel_graph, build_live_mask, find_removable_layers, get_kept_units
from ...compute.structure.tracing import Untraceable
from ...core.errors import ConfigError
from ...core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ...core.mask import Mask
from ...core.needs import Need, Needs
from ...core.params import Layout
from ...training import Site
from ..method import TRAIN, MethodConfig, broadcast
from ..scores.scbf.apoz import count_zeros, encode_counts, locate_counts, pool_apoz, remove_idle_units
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
    counting_site: str = "sites"
    """sites: all sites count zeros, on their training examples; or the name of the one site that holds the server's
    validation set and does not train"""
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

    def init(self, weights: Tensor, sites: Sequence[str]) -> SelectiveState:
        name = self.config.counting_site
        if name not in ("sites", *sites):
            raise ConfigError(f"method.counting_site: no site {name!r}; there are {', '.join(sites)}")
        if list(sites) == [name]:
            raise ConfigError(f"method.counting_site: {name!r} is the only site, so no site would train")
        return super().init(weights, sites)

    def select_sites(self, state: SelectiveState, sites: Sequence[str]) -> list[str]:
        return super().select_sites(state, [site for site in sites if site != self.config.counting_site])

    def ask(self, state: SelectiveState, sites: Sequence[str]) -> dict[str, Assignment]:
        all_count = self.config.counting_site == "sites"
        if state.phase == COUNT:
            model = self.model(state)
            assignment = Assignment(
                Request(COUNT, state.round - 1, model, state.live),
                UpdateSpec("scores", mask=self._count_mask, min_value=0.0),
            )
            return broadcast(sites if all_count else [self.config.counting_site], assignment)
        assignment = self.build_assignment(TRAIN, state)
        if state.phase == "counted" and all_count:
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
    def named_sites(self) -> tuple[str, ...]:
        name = self.config.counting_site
        return () if name == "sites" else (name,)

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
