"""NeuroSFL (Thapaliya et al. 2024), Algorithm 1: one global SNIP mask at the start, then FedAvg inside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..aggregation.robust import aggregate
from ..aggregation.weighted import average_over_owners, weigh_by_examples, weigh_equally, weighted_sum
from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask, floor_fraction, top_k, top_k_per_tensor
from ..scores.erk import compute_erk_densities, draw_random_mask
from ..scores.snip import compute_keep_counts, compute_saliency
from ..seeds import make_generator
from ..training import Site
from .method import AveragingConfig, MaskPreset, Method, broadcast, sample_sites


class Config(AveragingConfig):
    sparsity: float = Field(
        0.9, ge=0, lt=1, description="p: share of the maskable entries that is off for the whole run"
    )
    scores: Literal["snip", "iter_snip", "weighted_snip", "individual_snip", "random"] = Field(
        "snip",
        description="snip: sum of the sites' |saliency|; weighted_snip: weighted by examples; iter_snip: several "
        "minibatches or steps; individual_snip: a mask of its own for every site; random: no data needed",
    )
    iter_snip: Literal["minibatch", "progressive"] = Field(
        "minibatch", description="average over minibatches, or prune in steps (De Jorge et al.)"
    )
    iterations: int = Field(10, ge=1, description="minibatches or steps of iter_snip")
    step_sizes: Literal["exponential", "linear"] = Field("exponential", description="live counts of progressive steps")
    saliency_batches: int | None = Field(1, ge=1, description="minibatches per saliency; none: all training examples")
    signed: bool = Field(False, description="rank |sum of signed saliencies|: the pooled loss's SNIP, a test oracle")
    min_per_layer: int = Field(1, ge=0, description="live entries that every maskable tensor keeps; 0 as in the paper")
    random_layers: Literal["uniform", "erk"] = Field("uniform", description="where a random mask puts its entries")
    random_site: bool = Field(
        False, description="individual_snip: the mask of one site, drawn at random, for all (the paper's section 5.1)"
    )
    average_over_owners: bool = Field(
        False, description="individual_snip: average over a coordinate's holders instead of counting zeros"
    )
    maskable: MaskPreset = Field("conv_linear_weights", description="which parameters may be masked")

    @model_validator(mode="after")
    def _one_site(self) -> Config:
        if self.random_site and self.scores != "individual_snip":
            raise ValueError(f"random_site: true needs scores: individual_snip, not {self.scores}")
        return self

    @property
    def own_masks(self) -> bool:
        """Every site trains inside a mask of its own."""
        return self.scores == "individual_snip" and not self.random_site

    @property
    def encryption_blocker(self) -> str:
        masks = f"scores: {self.scores} gives each site entries of its own" if self.own_masks else ""
        return self.aggregation_blocker or masks

    @property
    def steps(self) -> int:
        """Score exchanges before training starts."""
        if self.scores == "random":
            return 0
        return self.iterations if self.scores == "iter_snip" and self.iter_snip == "progressive" else 1

    @property
    def minibatches(self) -> int | None:
        averaging = self.scores == "iter_snip" and self.iter_snip == "minibatch"
        return self.iterations if averaging else self.saliency_batches


@dataclass(frozen=True)
class State:
    """``masks`` holds one mask for all sites or, with individual masks, one for each of ``owners``."""

    round: int
    step: int
    weights: Tensor
    masks: tuple[Mask, ...]
    owners: tuple[str, ...]


class NeuroSFL(Method[State]):
    """Phase 1: every site scores the common start, the server keeps the top; phase 2: FedAvg of the live entries."""

    name = "neurosfl"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        state = State(0, 0, weights, (self.full_mask,), ())
        if self.config.scores != "random":
            return state
        maskable = self._maskable
        draw = make_generator(self.seed, "random mask")
        if self.config.random_layers == "erk":
            densities = compute_erk_densities(self.layout, maskable, 1 - self.config.sparsity)
            return self._start(state, [draw_random_mask(self.layout, maskable, densities, draw)])
        noise = torch.rand(self.layout.size, generator=draw)
        return self._start(state, [top_k(noise, floor_fraction(1 - self.config.sparsity, maskable.count), maskable)])

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        if state.round == 0:
            model = self.model(state)
            rated = self._maskable & model.mask
            least = None if self.config.signed else 0.0
            return broadcast(
                sites,
                Assignment(Request("score", 0, model, model.mask), UpdateSpec("scores", mask=rated, min_value=least)),
            )
        training = [name for name in sites if name in state.owners] if state.owners else sites
        return self._models("train", state, sample_sites(training, self.config.participation, self.seed, state.round))

    def answer(self, request: Request, site: Site) -> Update:
        return self._score(request, site) if request.kind == "score" else self._train(request, site)

    def _score(self, request: Request, site: Site) -> Update:
        scores = compute_saliency(
            site,
            site.weights,
            batch_size=self.config.training.batch_size,
            batches=self.config.minibatches,
            t=request.round,
            signed=self.config.signed,
        )
        rated = self._maskable & request.trainable
        return Update(Patch.from_vector(scores, rated), "scores", site.num_examples)

    def _train(self, request: Request, site: Site) -> Update:
        weights = site.train(site.weights, request.trainable, self.config.training, request.round)
        return Update(Patch.from_vector(weights, request.trainable), "weights", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        if state.round == 0:
            return self._choose(state, updates)
        if state.owners and self.config.average_over_owners:
            weights = average_over_owners(updates, weigh_by_examples, fallback=state.weights)
        else:
            weights = aggregate(updates, state.weights, self.config.aggregation)
        return replace(state, round=state.round + 1, weights=weights)

    def _choose(self, state: State, updates: Sequence[Contribution]) -> State:
        """Masks from this step's scores: T_q(sum_k |s_k|), Eq. 7."""
        step = state.step + 1
        maskable = self._maskable
        keep = floor_fraction(1 - self.config.sparsity, maskable.count)
        linear = self.config.step_sizes == "linear"
        live = compute_keep_counts(maskable.count, keep, self.config.steps, exponential=not linear)[step - 1]
        pool = updates[0].patch.mask
        if self.config.own_masks:
            scores = [update.patch.to_vector() for update in updates]
        elif self.config.random_site:
            scores = [updates[self._drawn(len(updates))].patch.to_vector()]
        else:
            scores = [self._pooled(updates)]
        masks = [top_k_per_tensor(s.abs(), live, self.layout, pool, self.config.min_per_layer) for s in scores]
        if step < self.config.steps:
            return replace(state, step=step, masks=tuple(mask | ~maskable for mask in masks))
        owners = tuple(update.site for update in updates) if self.config.own_masks else ()
        return self._start(replace(state, step=step, owners=owners), masks)

    def _pooled(self, updates: Sequence[Contribution]) -> Tensor:
        """One score of each entry; with a robust ``aggregation`` no site's own size of scores decides."""
        aggregation = self.config.aggregation
        if aggregation.needs_single_updates:
            owners = min(aggregation.min_owners, len(updates))  # all send the same entries
            nothing = torch.zeros(self.layout.size)
            return aggregate(updates, nothing, aggregation.model_copy(update={"min_owners": owners}))
        weighted = self.config.scores == "weighted_snip" or self.config.signed
        return weighted_sum(updates, weigh_by_examples if weighted else weigh_equally)

    def _drawn(self, sites: int) -> int:
        return int(torch.randint(sites, (1,), generator=make_generator(self.seed, "random site")))

    def _start(self, state: State, masks: Sequence[Mask]) -> State:
        """Training begins: theta <- theta_0 (.) m; what is not maskable stays on."""
        live = tuple(mask | ~self._maskable for mask in masks)
        return replace(state, round=1, weights=state.weights * _union(live).bits, masks=live)

    def _models(self, kind: str, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        """The model of each site: one for all, or the global one under the site's own mask."""
        if not state.owners:
            model = self.model(state)
            return broadcast(
                sites, Assignment(Request(kind, state.round, model, model.mask), UpdateSpec(mask=model.mask))
            )
        own = {name: mask for name, mask in zip(state.owners, state.masks, strict=True) if name in sites}
        return {
            n: Assignment(Request(kind, state.round, Patch.from_vector(state.weights, m), m), UpdateSpec(mask=m))
            for n, m in own.items()
        }

    @cached_property
    def _maskable(self) -> Mask:
        return Mask.from_preset(self.layout, self.config.maskable)

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, _union(state.masks))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        return self._models(EVALUATE, state, sites)


def _union(masks: Sequence[Mask]) -> Mask:
    return reduce(Mask.__or__, masks)
