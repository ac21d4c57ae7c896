"""SCBF (Shao et al. 2020), Algorithm 2: each site reveals only the channels that moved most; the server adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from ..aggregation.weighted import apply_deltas, average_over_owners, weigh_by_examples, weigh_by_one, weighted_sum
from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask, floor_fraction
from ..params import Layout
from ..scores.scbf.groups import Biases, Groups, Selection
from ..scores.scbf.selection import NeuronGroups, build_groups
from ..seeds import make_generator
from ..training import Site
from .method import Method, MethodConfig, broadcast, sample_sites

Aggregation = Literal["sum", "mean", "count"]


class Config(MethodConfig):
    rate: float = Field(0.3, gt=0, le=1, description="alpha: share of the channels that a site selects in a round")
    budget: float | None = Field(
        None, gt=0, le=1, description="instead of rate: share of the parameters that is uploaded, exactly"
    )
    selection: Selection = Field(
        "positive",
        description="positive: reveal what at least one selected channel passes; negative: what no other passes",
    )
    biases: Biases = Field("selected", description="biases go with the selected channels, never (as printed), or all")
    aggregation: Aggregation = Field(
        "sum",
        description="sum: add all changes (the paper; a server learning rate of K); mean: weighted by examples, absent "
        "changes are zero; count: over those that reveal an entry",
    )
    channels: Literal["paths", "layerwise"] = Field(
        "paths", description="paths through the network, or each layer's neurons by themselves"
    )
    layer_mean: bool = Field(False, description="divide each layer's squared changes by their mean before adding")
    listed_channels: int = Field(
        5_000_000, ge=1, description="networks with up to so many channels have an exact threshold"
    )
    drawn_channels: int = Field(
        1_000_000, ge=1000, description="others have the quantile of so many channels drawn at random"
    )


class SiteConfig(BaseModel):
    """What a site may set for itself, in its site file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rate: float | None = Field(None, gt=0, le=1, description="alpha at this site")
    budget: float | None = Field(None, gt=0, le=1, description="share of the parameters that this site uploads")


@dataclass(frozen=True)
class State:
    """``live``: entries of the units that have not been removed; ``phase``: what comes next (``scbfwp``).

    ``changed``: what the last round moved; the sites hold all else.
    """

    round: int
    weights: Tensor
    live: Mask
    changed: Mask
    prunings: int = 0
    phase: str = "train"


class SCBF(Method[State]):
    """An upload carries the new values of the revealed entries; the server, which knows what it sent, takes their
    change in float64, so that nothing is lost to a difference in float32.

    A site reveals where its data moved the model most. There is no noise in it and no privacy guarantee (2.4 #12).
    """

    name = "scbf"
    Config: ClassVar[type[MethodConfig]] = Config
    SiteConfig: ClassVar[type[BaseModel] | None] = SiteConfig

    def __init__(self, config: MethodConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._latest: Groups | None = None

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights, self.full_mask, self.full_mask)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        asked = sample_sites(sites, self.config.participation, self.seed, state.round)
        return broadcast(asked, self._question("train", state))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        return broadcast(sites, self._question(EVALUATE, state))

    def _question(self, kind: str, state: State) -> Assignment:
        """What a round changed, to sites that hold all else; everything where saying which costs more."""
        request = Assignment(
            Request(kind, state.round, self.model(state), state.live),
            UpdateSpec(accepts=partial(self._allowed, state.live)),
        )
        if not state.live.is_full or state.changed.count > 31 / 32 * self.layout.size:
            return request
        news = Patch.from_vector(state.weights, state.changed, over="previous")
        return replace(request, request=replace(request.request, model=news), full_model=request.request.model)

    def _allowed(self, live: Mask, site: str, on: Mask) -> bool:
        """Nothing that was removed comes back because a site sends it."""
        return on <= live

    def answer(self, request: Request, site: Site) -> Update:
        here = site.narrow(request.trainable)
        trained = here.train(here.weights, Mask.full(here.layout.size), self.config.training, request.round)
        revealed = self.revealed(trained - here.weights, here, request.round)
        on = torch.zeros(self.layout.size, dtype=torch.bool)
        on[request.trainable.indices] = revealed.bits
        return Update(
            Patch(revealed.take(trained), Mask(on)), "weights", site.num_examples, here.evaluate(here.weights)
        )

    def revealed(self, change: Tensor, site: Site, t: int) -> Mask:
        """The entries of a change ``(P,)`` that leave a site in round ``t``."""
        own = site.site_settings or SiteConfig()
        rate = own.rate or self.config.rate
        budget = own.budget or (self.config.budget if own.rate is None else None)
        found = self._groups(site.layout)
        if budget is not None:
            return found.select_by_budget(change, budget)
        draw = make_generator(self.seed, "channels", site.name, t)
        return found.select_by_rate(change, rate, self.config.selection, draw)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        changed = updates[0].patch.mask
        for update in updates[1:]:
            changed = changed | update.patch.mask
        weights = torch.where(changed.bits, self.combined(state, updates), state.weights)
        return replace(state, round=state.round + 1, weights=weights, changed=changed)

    def combined(self, state: State, updates: Sequence[Contribution]) -> Tensor:
        """The new weights ``(P,)`` where a site revealed something; what nobody revealed keeps its bits."""
        before, aggregation = state.weights, self.config.aggregation
        if aggregation == "mean":
            whole = [
                replace(u, patch=Patch.from_vector(u.patch.write_into(before.clone()), state.live)) for u in updates
            ]
            return weighted_sum(whole, weigh_by_examples)
        average = average_over_owners(updates, weigh_by_examples, fallback=before)
        if aggregation == "count":
            return average
        return torch.where(
            self._parameters.bits, apply_deltas(updates, weigh_by_one, before), average
        )  # statistics are never added

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, state.live)

    @property
    def note(self) -> str:
        found, budget = self._groups(self.layout), self.config.budget
        limit = (
            found.threshold
            if budget is None
            else f"{floor_fraction(budget, self.layout.trainable_size):,} parameters a message"
        )
        return f"{found.found}, {limit}"

    @cached_property
    def _parameters(self) -> Mask:
        return Mask.from_tensors(self.layout, lambda entry: entry.role != "buffer")

    def _groups(self, layout: Layout) -> Groups:
        """Those of a network; made once for each structure."""
        if self._latest is None or self._latest.layout != layout:
            self._latest = self._made(layout)
        return self._latest

    def _made(self, layout: Layout) -> Groups:
        if self.config.channels == "layerwise":
            return NeuronGroups(layout, self.config.biases)
        return build_groups(
            layout,
            self.config.biases,
            layer_mean=self.config.layer_mean,
            list_up_to=self.config.listed_channels,
            drawn=self.config.drawn_channels,
        )
