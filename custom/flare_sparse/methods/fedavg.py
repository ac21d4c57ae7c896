"""FedAvg (McMahan et al. 2017): the dense baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field, model_validator
from torch import Tensor

from ..aggregation.robust import aggregate
from ..aggregation.weighted import apply_deltas, weigh_by_examples
from ..exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..training import Site
from .method import AveragingConfig, Method, broadcast, sample_sites


class Config(AveragingConfig):
    server_lr: float = Field(1.0, gt=0, description="step that the server takes towards the average; K adds up changes")

    @model_validator(mode="after")
    def _one_rule(self) -> Config:
        if self.server_lr != 1 and self.aggregation.rule != "mean":
            raise ValueError(
                f"server_lr {self.server_lr} is a step towards the mean; leave it at 1 with {self.aggregation.rule}"
            )
        return self

    @property
    def encryption_blocker(self) -> str:
        step = "" if self.server_lr == 1 else f"server_lr {self.server_lr} is a step from a model that the server reads"
        return self.aggregation_blocker or step


@dataclass(frozen=True)
class State:
    round: int
    weights: Tensor


class FedAvg(Method[State]):
    """Every site trains the whole model; the server averages by examples."""

    name = "fedavg"
    Config = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        model = self.model(state)
        asked = sample_sites(sites, self.config.participation, self.seed, state.round)
        return broadcast(
            asked, Assignment(Request("train", state.round, model, model.mask), UpdateSpec(mask=model.mask))
        )

    def answer(self, request: Request, site: Site) -> Update:
        weights = site.train(site.weights, request.trainable, self.config.training, request.round)
        return Update(Patch.from_vector(weights, request.trainable), "weights", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        weights, step = aggregate(updates, state.weights, self.config.aggregation), self.config.server_lr
        if step != 1:  # running statistics are averaged whatever the step
            size = self.layout.trainable_size
            weights[:size] = apply_deltas(updates, lambda us: [step * w for w in weigh_by_examples(us)], state.weights)[
                :size
            ]
        return State(state.round + 1, weights)

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)
