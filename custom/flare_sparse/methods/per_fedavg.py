"""Per-FedAvg (Fallah et al. 2020, arXiv:2002.07948), Algorithm 1: learn a start from which one step goes far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from ..aggregation.weighted import weigh_equally, weighted_sum
from ..exchange import Contribution, Patch, Request, Update
from ..training import Site
from .fedavg import State
from .fedavg_one_step import FedAvgOneStep
from .method import MethodConfig
from .support.adaptation import AdaptationConfig, report_adaptation


class Config(AdaptationConfig):
    """``adapt_lr`` is the paper's alpha, ``training.lr`` its beta; plain SGD whatever ``training.optimizer`` says;
    ``training.clip_norm`` bounds every gradient.
    """

    local_steps: int = Field(1, ge=1, description="tau: meta-steps of a site in a round")
    variant: Literal["first_order", "hessian_free"] = Field(
        "first_order", description="without second derivatives (FO), or with their product by differences (HF)"
    )
    delta: float = Field(1e-3, gt=0, description="half the distance of the two gradients of HF, times the direction")


class PerFedAvg(FedAvgOneStep):
    """A site descends on its loss after one step; the server takes the plain mean. The targets take that step."""

    name = "per_fedavg"
    Config: ClassVar[type[MethodConfig]] = Config

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind == "adapt":
            return report_adaptation(site, self.adapt(site, request.trainable))
        weights = site.weights
        for step in range(self.config.local_steps):
            stream = 3 * ((request.round - 1) * self.config.local_steps + step)
            direction = self.meta_gradient(site, weights, stream) * request.trainable.bits
            weights = weights - self.config.training.compute_learning_rate(request.round) * direction
        return Update(Patch.from_vector(weights, request.trainable), "weights", site.num_examples)

    def meta_gradient(self, site: Site, weights: Tensor, stream: int) -> Tensor:
        """``(I - alpha Hessian) grad f(w - alpha grad f(w))`` ``(P,)`` on three batches; the Hessian is left out in FO.

        HF: ``Hessian v = (grad f(w + delta v) - grad f(w - delta v)) / (2 delta)`` (section 5 there).

        Args:
            site: computes gradients.
            weights: ``(P,)`` w.
            stream: names the batches; ``stream`` to ``stream + 2`` are used.
        """
        alpha, delta = self.config.adapt_lr, self.config.delta
        ahead = weights - alpha * self._gradient(site, weights, stream)
        v: Tensor = self._gradient(site, ahead, stream + 1)
        if self.config.variant == "first_order":
            return v
        up, down = (self._gradient(site, weights + sign * delta * v, stream + 2) for sign in (1, -1))
        curvature: Tensor = (up - down) / (2 * delta)
        return v.sub(curvature, alpha=alpha)

    def _gradient(self, site: Site, weights: Tensor, stream: int) -> Tensor:
        training = self.config.training
        gradient: Tensor = next(iter(site.compute_gradients(weights, training.batch_size, 1, stream)))
        if training.clip_norm is None:
            return gradient
        return gradient.mul(min(1.0, training.clip_norm / max(float(gradient.norm()), 1e-12)))

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        return State(state.round + 1, weighted_sum(updates, weigh_equally))
