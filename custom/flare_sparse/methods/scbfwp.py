"""SCBFwP (Shao et al. 2020, section 3.3): SCBF whose server removes the units that are idle most often (APoZ)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ConfigError
from ..exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask
from ..params import Layout
from ..scores.scbf.apoz import count_zeros, encode_counts, locate_counts, pool_apoz, remove_idle_units
from ..structure import build_channel_graph, build_live_mask, find_removable_layers, get_kept_units
from ..training import Site
from . import scbf
from .method import MethodConfig, broadcast
from .scbf import SCBF, State


class Pruning(MethodConfig):
    """When and what the server prunes."""

    pruning_rate: float = Field(0.1, gt=0, lt=1, description="theta: share of the units left that a pruning removes")
    prunings: int = Field(6, ge=0, description="one after each round of training, until there were so many")
    pruned_share: float | None = Field(
        None, ge=0, lt=1, description="theta_total, instead of prunings: go on while the pruned share is below it"
    )
    counted_at: str = Field(
        "sites",
        description="who counts zeros: all sites, on their training examples; or the name of the one site that holds "
        "the server's validation set and does not train",
    )
    ranking: Literal["network", "layer"] = Field("network", description="one ranking over all layers, or one per layer")
    least_left: float = Field(0.05, ge=0, lt=1, description="share of its units that every layer keeps; at least one")

    def due(self, done: int) -> bool:
        """Whether there is another pruning after ``done``: while strictly below the total (ALGORITHMS 2.4 #8)."""
        if self.pruned_share is None:
            return done < self.prunings
        return 1 - (1 - self.pruning_rate) ** done < self.pruned_share - 1e-9

    def units_left(self, units: int, done: int) -> int:
        """Of ``units`` those that are left after ``done`` prunings (ALGORITHMS 2.4 #9)."""
        return round(units * (1 - self.pruning_rate) ** done)


class Config(scbf.Config, Pruning):
    """Of SCBF and of the pruning."""


class SCBFwP(SCBF):
    """After a round of training, while pruning is due, sites say how often each unit was zero; then units go.

    What is left is a smaller network: sites train that, and messages carry its entries only. Its structure travels
    once, as the mask that it leaves; a site that comes later gets it with the model.
    """

    name = "scbfwp"
    Config: ClassVar[type[MethodConfig]] = Config

    def __init__(self, config: MethodConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._layers = find_removable_layers(build_channel_graph(layout))
        if not self._layers:
            raise ConfigError(f"method {self.name}: the network has no hidden layer with a ReLU to remove units from")

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        if self.config.counted_at not in ("sites", *sites):
            raise ConfigError(f"method.counted_at: no site {self.config.counted_at!r}; there are {', '.join(sites)}")
        if list(sites) == [self.config.counted_at]:
            raise ConfigError(f"method.counted_at: {self.config.counted_at!r} is the only site, so no site would train")
        return super().init(weights, sites)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        counter = self.config.counted_at
        if state.phase == "count":
            model = self.model(state)
            question = Assignment(
                Request("count", state.round - 1, model, state.live),
                UpdateSpec("scores", mask=self._reported, min_value=0.0),
            )
            return broadcast(sites if counter == "sites" else [counter], question)
        asked = super().ask(state, [site for site in sites if site != counter])
        if not asked or state.phase != "counted" or counter != "sites":
            return asked
        held = replace(
            Patch.empty(self.layout.size), base="previous"
        )  # the sites have the model: they counted its zeros
        train = next(iter(asked.values()))
        structure_only = replace(train.request, model=held)
        return broadcast(list(asked), replace(train, request=structure_only, full_model=train.request.model))

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != "count":
            return super().answer(request, site)
        counts = count_zeros(site, site.weights, self._layers)
        return Update(encode_counts(counts, self._places, self.layout.size), "scores", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        if state.phase == "count":
            return self._pruned(state, updates)
        due = self.config.due(state.prunings) and state.round < self.config.rounds
        return replace(super().learn(state, updates), phase="count" if due else "train")

    def _pruned(self, state: State, updates: Sequence[Contribution]) -> State:
        kept = get_kept_units(self.layout, self._layers, state.live)
        units = sum(layer.units for layer in self._layers)
        surplus = sum(int(layer.sum()) for layer in kept) - self.config.units_left(units, state.prunings + 1)
        left = remove_idle_units(
            kept,
            pool_apoz(updates, self._places),
            max(surplus, 0),
            at_least=self.config.least_left,
            per_layer=self.config.ranking == "layer",
        )
        live = build_live_mask(self.layout, self._layers, left)
        weights = torch.where(live.bits, state.weights, 0.0)
        return replace(state, weights=weights, live=live, prunings=state.prunings + 1, phase="counted")

    @cached_property
    def _places(self) -> Tensor:
        return locate_counts(self.layout, self._layers)

    @cached_property
    def _reported(self) -> Mask:
        on = torch.zeros(self.layout.size, dtype=torch.bool)
        on[self._places] = True
        return Mask(on)

    @property
    def note(self) -> str:
        return f"{super().note}; {self._removable_note}"

    @property
    def _removable_note(self) -> str:
        units = sum(layer.units for layer in self._layers)
        return f"{units} units of {len(self._layers)} layers can be removed"
