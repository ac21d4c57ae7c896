"""DisPFL (Dai et al. 2022): personal sparse models that meet their neighbours' on common ground; the server relays.

The paper has no server; here one keeps every site's weights and mask and hands each site the coordinate-wise average
of its neighbours, which is the same arithmetic. The server therefore learns everything (docs/new-method.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..exchange import EVALUATE, Assignment, Contribution, Patch, Request, Update
from ..mask import Mask, top_k
from ..scores.erk import compute_erk_densities, draw_random_mask
from ..seeds import make_generator
from ..training import Site
from .method import MaskPreset, Method, MethodConfig, sample_sites


class Config(MethodConfig):
    sparsity: float = Field(0.5, ge=0, lt=1, description="share of a personal model's entries that is off")
    layers: Literal["erk", "uniform"] = Field("erk", description="density per tensor")
    same_start: bool = Field(False, description="all sites begin with the same mask")
    neighbours: Literal["random", "ring", "full"] = Field("random", description="whose models a site is given")
    count: int = Field(2, ge=1, description="number of random neighbours")
    anneal: float = Field(0.5, ge=0, le=1, description="share of a tensor's live entries that moves in round 1")
    regrow: Literal["gradient", "random"] = Field("gradient", description="where dropped entries come back")
    maskable: MaskPreset = Field("all_trainable", description="which parameters a personal mask covers")

    def drop_ratio(self, r: int) -> float:
        """``anneal / 2 * (1 + cos(pi * r / T))`` for the 0-based round ``r``."""
        return self.anneal / 2 * (1 + math.cos(math.pi * r / self.rounds))


@dataclass(frozen=True)
class State:
    """``weights`` and ``masks`` ``(K, P)``: one row for each of ``owners``; a row is zero outside its mask."""

    round: int
    owners: tuple[str, ...]
    weights: Tensor
    masks: Tensor


class DisPFL(Method[State]):
    """Each site trains inside its mask, drops its smallest weights and regrows as many elsewhere."""

    name = "dispfl"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        owners = tuple(sorted(sites))
        maskable = Mask.from_preset(self.layout, self.config.maskable)
        density = 1 - self.config.sparsity
        densities = (
            compute_erk_densities(self.layout, maskable, density)
            if self.config.layers == "erk"
            else {entry.name: density for entry in self.layout.tensors}
        )
        rows = []
        for name in owners:
            draw = make_generator(self.seed, "dispfl mask", "" if self.config.same_start else name)
            rows.append((draw_random_mask(self.layout, maskable, densities, draw) | ~maskable).bits)
        masks = torch.stack(rows)
        return State(1, owners, weights * masks, masks)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        owning = [name for name in sites if name in state.owners]
        active = sample_sites(owning, self.config.participation, self.seed, state.round)
        return {name: self._request("train", state, name, active) for name in active}

    def _request(self, kind: str, state: State, name: str, active: Sequence[str]) -> Assignment:
        """w~ (.) m_k: the sum of the neighbours' weights over the number of neighbours that hold a coordinate."""
        rows = [state.owners.index(other) for other in self._met(state, name, active)]
        held = state.masks[rows].sum(0)
        mean = state.weights[rows].double().sum(0) / held.clamp_min(1)
        mask = Mask(state.masks[state.owners.index(name)])
        return Assignment(Request(kind, state.round, Patch.from_vector(mean.float(), mask), mask))

    def _met(self, state: State, name: str, active: Sequence[str]) -> list[str]:
        """The site itself and its neighbours of this round."""
        others = sorted(other for other in state.owners if other != name and other in active)
        if self.config.neighbours == "ring" and others:
            circle = sorted([*others, name])
            at = circle.index(name)
            others = sorted({circle[at - 1], circle[(at + 1) % len(circle)]} - {name})
        elif self.config.neighbours == "random":
            draw = make_generator(self.seed, "dispfl neighbours", state.round, name)
            order = torch.randperm(len(others), generator=draw)[: self.config.count]
            others = [others[i] for i in order.tolist()]
        return sorted([name, *others])

    def answer(self, request: Request, site: Site) -> Update:
        weights = site.train(site.weights, request.trainable, self.config.training, request.round)
        mask = self._evolve(request, site, weights)
        kept = mask & request.trainable  # what has just regrown starts at zero
        return Update(Patch.from_vector(weights * kept.bits, mask), "weights", site.num_examples)

    def _evolve(self, request: Request, site: Site, weights: Tensor) -> Mask:
        """Per tensor: drop the smallest live weights, regrow as many; the count stays."""
        maskable = Mask.from_preset(self.layout, self.config.maskable)
        ratio = self.config.drop_ratio(request.round - 1)
        growth = self._growth(request, site, weights)
        live = request.trainable & maskable
        for entry in self.layout.tensors:
            tensor = Mask.from_tensors(self.layout, lambda e, wanted=entry: e is wanted) & maskable  # type: ignore[misc]
            held = live & tensor
            moving = min(math.ceil(ratio * held.count), tensor.count - held.count)
            if moving > 0:
                kept = held - top_k(-weights.abs(), moving, held)
                live = (live - held) | kept | top_k(growth, moving, tensor - kept)
        return live | (request.trainable - maskable)

    def _growth(self, request: Request, site: Site, weights: Tensor) -> Tensor:
        """Scores of empty places: the gradient's size on one minibatch, or chance."""
        if self.config.regrow == "random":
            return torch.rand(self.layout.size, generator=make_generator(self.seed, "regrow", site.name, request.round))
        return next(site.compute_gradients(weights, self.config.training.batch_size, 1, request.round)).abs()

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        weights, masks = state.weights.clone(), state.masks.clone()
        for update in updates:
            row = state.owners.index(update.site)
            masks[row] = update.patch.mask.bits
            weights[row] = update.patch.to_vector()
        return State(state.round + 1, state.owners, weights, masks)

    def model(self, state: State) -> Patch:
        """Where a single model is asked for: the average over the holders of each coordinate."""
        held = state.masks.sum(0)
        return Patch.from_vector((state.weights.double().sum(0) / held.clamp_min(1)).float(), Mask(held > 0))

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        personal = {}
        for name, weights, row in zip(state.owners, state.weights, state.masks, strict=True):
            if name in sites:
                mask = Mask(row)
                personal[name] = Assignment(Request(EVALUATE, state.round, Patch.from_vector(weights, mask), mask))
        return personal
