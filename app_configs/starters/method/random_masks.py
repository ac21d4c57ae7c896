"""Random masks (an example): every round trains another random sub-network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from pydantic import Field
from torch import Tensor

from flare_sparse.methods import (
    Assignment,
    Contribution,
    Mask,
    Method,
    MethodConfig,
    ModelState,
    Patch,
    Request,
    UpdateSpec,
    average_over_owners,
    floor_fraction,
    make_generator,
    top_k,
    weigh_by_examples,
)


class Config(MethodConfig):
    density: float = Field(0.5, gt=0, le=1, description="share of the entries that train in a round")


@final
class RandomMasks(Method[Config, ModelState]):
    """Sites receive the model, train the entries of a random mask and return them; the server averages."""

    name = "random_masks"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> ModelState:
        return ModelState(1, weights)

    def build_assignment(self, kind: str, state: ModelState) -> Assignment:
        noise = torch.rand(self.layout.size, generator=make_generator(self.seed, "random masks", state.round))
        mask = top_k(noise, floor_fraction(self.config.density, self.layout.size))
        return Assignment(Request(kind, state.round, self.model(state), mask), UpdateSpec(mask=mask))

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        weights = average_over_owners(contributions, weigh_by_examples, fallback=state.weights)
        return ModelState(state.round + 1, weights)

    def model(self, state: ModelState) -> Patch:
        return Patch.from_vector(state.weights, Mask.full(self.layout.size))
