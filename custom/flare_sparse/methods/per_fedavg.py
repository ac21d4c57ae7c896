"""Per-FedAvg (Fallah et al. 2020), Algorithm 1: learn an initial model that adapts in one step.

"Personalized Federated Learning: A Meta-Learning Approach", arXiv 2002.07948; docs/algorithms.md, section 6.10.

FedAvg + one step (Lin et al. 2021), section 5.2: FedAvg's model gets one gradient step at each target site.

A baseline of "MetaGater: Fast Learning of Conditional Channel Gated Networks via Federated Meta-Learning", arXiv
2011.12511; docs/algorithms.md, section 6.10.
"""

from collections.abc import Sequence
from typing import Literal, Self, final

from pydantic import Field, model_validator
from torch import Tensor

from ..core.exchange import Contribution, Patch, Request, Update
from ..core.mask import Mask
from ..core.needs import Need, Needs
from ..training import Site, TrainingConfig
from .aggregation.weighted import Weights, weigh_by_examples, weigh_equally, weighted_sum
from .method import TRAIN, ModelState, train_locally
from .support.adaptation import AdaptationConfig, AdaptationMethod

_IGNORED = ("optimizer", "accumulate", "momentum", "weight_decay", "proximal")
"""Settings of training that a meta-step does not read."""


class PerFedAvgConfig(AdaptationConfig):
    """``adapt_lr`` is the paper's alpha, ``training.lr`` its beta.

    Meta-steps are counted, not epochs. The optimiser is plain SGD, also where ``training.optimizer`` has its default;
    ``training.clip_norm`` bounds every gradient.
    """

    local_steps: int = Field(1, ge=1)
    """tau: meta-steps of a site in a round"""

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        for name in _IGNORED:
            value = getattr(self.training, name)
            if value not in (TrainingConfig.model_fields[name].default, "sgd"):
                raise ValueError(
                    f"training.{name} {value} has no effect on a meta-step, which is one of plain SGD; leave it out"
                )
        return self

    def needs(self) -> Needs:
        return super().needs() | {Need.FLOAT32_STEPS.because("a meta-step is one of plain SGD in float32")}


@final
class PerFedAvg(AdaptationMethod[PerFedAvgConfig, ModelState]):
    """Sites minimise their loss after one step; the server averages with equal weights; targets take that step."""

    name = "per_fedavg"
    Config = PerFedAvgConfig
    trains_all_entries = True

    def train(self, request: Request, site: Site) -> Update:
        weights, live = site.start, request.trainable.bits.to(site.trainer.device)
        learning_rate = self.config.get_training(request.round).compute_learning_rate(request.round)
        for step in range(self.config.local_steps):
            # The paper draws three minibatches a step; its first-order variant needs no third one, for the Hessian.
            stream = 3 * ((request.round - 1) * self.config.local_steps + step)
            weights = weights - learning_rate * (self.compute_meta_gradient(site, weights, stream) * live)
        weights = self._update_statistics(request, site, weights)
        return Update(Patch.from_vector(weights, request.trainable), self.update_content, site.num_examples)

    def _update_statistics(self, request: Request, site: Site, weights: Tensor) -> Tensor:
        """Return ``weights`` ``(P,)`` with running statistics of ``local_steps`` minibatches of the site."""
        statistics = request.trainable & Mask.from_tensors(self.layout, lambda tensor: tensor.role == "buffer")
        if not statistics.count:
            return weights
        # Gradients are taken on copies of the model, whose buffers are discarded. Statistics that stay at their initial
        # values would make every evaluation meaningless.
        training, steps = self.config.training, self.config.local_steps
        return site.train(weights, statistics, training, request.round, steps=steps, stream="statistics")

    def compute_meta_gradient(self, site: Site, weights: Tensor, stream: int) -> Tensor:
        """Return ``grad f(w - alpha grad f(w))`` ``(P,)``, the paper's first-order variant, each on its own minibatch.

        Args:
            site: computes gradients.
            weights: ``(P,)`` w.
            stream: names the minibatches; ``stream`` and ``stream + 1`` are used.
        """
        adapted = weights - self.config.adapt_lr * self._compute_gradient(site, weights, stream)
        return self._compute_gradient(site, adapted, stream + 1)

    def _compute_gradient(self, site: Site, weights: Tensor, stream: int) -> Tensor:
        """Return the clipped gradient ``(P,)`` of one minibatch."""
        training = self.config.training
        gradient = next(site.trainer.compute_gradients(weights, training.batch_size, 1, stream))[0]
        if training.clip_norm is None:
            return gradient
        return gradient.mul(min(1.0, training.clip_norm / max(float(gradient.norm()), 1e-12)))

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        return ModelState(state.round + 1, weighted_sum(contributions, weigh_equally))

    def get_sum_weights(self, kind: str) -> Weights:
        return weigh_equally


class FedAvgOneStepConfig(AdaptationConfig):
    weighting: Literal["examples", "uniform"] = "examples"
    """weight of a site in the average"""


@final
class FedAvgOneStep(AdaptationMethod[FedAvgOneStepConfig, ModelState]):
    """Rounds as in FedAvg, of a few steps each; at the end every target takes one step and reports its metrics."""

    name = "fedavg_one_step"
    Config = FedAvgOneStepConfig
    trains_all_entries = True

    def train(self, request: Request, site: Site) -> Update:
        return train_locally(request, site, self.config.get_training(request.round), steps=self.config.local_steps)

    def learn(self, state: ModelState, contributions: Sequence[Contribution]) -> ModelState:
        return ModelState(state.round + 1, weighted_sum(contributions, self.get_sum_weights(TRAIN)))

    def get_sum_weights(self, kind: str) -> Weights:
        return weigh_by_examples if self.config.weighting == "examples" else weigh_equally
