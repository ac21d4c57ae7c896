"""FedAvg + one step (Lin et al. 2021, section 5.2): FedAvg's model gets one gradient step at each target site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from ..aggregation.weighted import weigh_by_examples, weigh_equally, weighted_sum
from ..exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..mask import Mask
from ..training import Site
from .fedavg import State
from .method import Method, MethodConfig, broadcast
from .support.adaptation import AdaptationConfig, ask_to_adapt, report_adaptation, take_one_step


class Config(AdaptationConfig):
    local_steps: int | None = Field(1, ge=1, description="gradient steps of a site in a round; null: training.epochs")
    weights: Literal["examples", "uniform"] = Field("examples", description="how much a site counts in the average")

    @property
    def encryption_blocker(self) -> str:
        return "" if self.weights == "examples" else f"weights: {self.weights} is not the mean by examples"


class FedAvgOneStep(Method[State]):
    """Rounds as in FedAvg, of a few steps each; at the end every target takes one step and reports its metrics."""

    name = "fedavg_one_step"
    Config: ClassVar[type[MethodConfig]] = Config

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return State(1, weights)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        if state.round > self.config.rounds:
            return None
        model = self.model(state)
        asked = self.config.asked(sites, self.seed, state.round)
        return broadcast(
            asked, Assignment(Request("train", state.round, model, model.mask), UpdateSpec(mask=model.mask))
        )

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind == "adapt":
            return report_adaptation(site, self.adapt(site, request.trainable))
        steps, training = self.config.local_steps, self.config.training
        weights = site.train(site.weights, request.trainable, training, request.round, steps=steps)
        return Update(Patch.from_vector(weights, request.trainable), "weights", site.num_examples)

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        rule = weigh_by_examples if self.config.weights == "examples" else weigh_equally
        return State(state.round + 1, weighted_sum(updates, rule))

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        return take_one_step(site, site.weights, [trainable], self.config)

    def model(self, state: State) -> Patch:
        return Patch.from_vector(state.weights, self.full_mask)

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        return ask_to_adapt(self.model(state), sites, self.config)
