"""MetaGater (Lin et al. 2021), Algorithm 1: meta-learn backbone and gates, adapt in one step.

"MetaGater: Fast Learning of Conditional Channel Gated Networks via Federated Meta-Learning", arXiv 2011.12511;
docs/algorithms.md, section 6. Sites send deltas of gates (phi) and backbone (theta). A channel whose gate group the
Group Lasso has made zero is closed for every input: by default neither group nor filter travels again. The server sees
every training site's delta; of a target site it sees metrics only.

MetaSNIP (Lin et al. 2021), section 5.3: MetaGater's backbone without gates, pruned once by SNIP at each target.

A baseline of "MetaGater: Fast Learning of Conditional Channel Gated Networks via Federated Meta-Learning", arXiv
2011.12511; docs/algorithms.md, section 6.10.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, final

import torch
from pydantic import Field
from torch import Tensor

from ..core.errors import ConfigError, suggest
from ..core.exchange import Contribution, Patch, Request, Update
from ..core.mask import Mask, floor_fraction, top_k
from ..core.params import Layout, TensorSpec
from ..training import Site
from .aggregation.weighted import Weights, weigh_equally, weighted_sum
from .method import train_locally
from .scores.scbf.groups import GroupSection
from .scores.snip import compute_saliency
from .support.adaptation import ADAPT, AdaptationMethod, MetaLearningConfig, take_one_step
from .support.gates import Gates, compute_group_lasso_prox, compute_l1_prox
from .support.schedules import StepSizes

Prox = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class MetaGaterState:
    """The three sequences of Algorithm 1.

    Attributes:
        round: t, the next round, 1-based.
        w: float32 ``(P,)``, w_{t-1}.
        ag: float32 ``(P,)``, w_{t-1}^ag, the aggregated sequence.
        sent: float32 ``(P,)``, w_{t-1}^pr, the model that was sent last.
    """

    round: int
    w: Tensor
    ag: Tensor
    sent: Tensor


def predict(w: Tensor, ag: Tensor, alpha: float) -> Tensor:
    """Return w_t^pr = alpha_t w_{t-1} + (1 - alpha_t) w_{t-1}^ag (line 4)."""
    return w if alpha == 1 else alpha * w + (1 - alpha) * ag


def advance(w: Tensor, pr: Tensor, g: Tensor, steps: StepSizes, prox: Prox, *, scale: bool) -> tuple[Tensor, Tensor]:
    """Return w_t and w_t^ag (lines 10 to 13): proximal steps along ``g`` from w_{t-1} and from w_t^pr.

    Args:
        w: ``(P,)`` w_{t-1}.
        pr: ``(P,)`` w_t^pr.
        g: ``(P,)`` gradient of the sites' envelopes.
        steps: eta_t, the length of the step from w_{t-1}, and beta_t, of the step from w_t^pr.
        prox: proximal operator of ``step * H`` for a given step.
        scale: False: the thresholds of both operators grow with beta_t.
    """
    return prox(w - steps.eta * g, steps.eta if scale else steps.beta), prox(pr - steps.beta * g, steps.beta)


ConfigT = TypeVar("ConfigT", bound=MetaLearningConfig)


class MetaLearningMethod(AdaptationMethod[ConfigT, MetaGaterState]):
    """Sites solve a proximal problem in a few steps; the server takes accelerated proximal steps on their deltas."""

    update_content = "delta"

    def init(self, weights: Tensor, sites: Sequence[str]) -> MetaGaterState:
        return MetaGaterState(1, weights, weights, weights)

    def train(self, request: Request, site: Site) -> Update:
        strength = self.config.proximity if self.config.local_proximity is None else self.config.local_proximity
        return train_locally(
            request,
            site,
            self.config.get_training(request.round),
            self.update_content,
            steps=self.config.local_steps,
            proximal_strength=strength,
            tolerance=self.config.local_accuracy,
        )

    def learn(self, state: MetaGaterState, contributions: Sequence[Contribution]) -> MetaGaterState:
        """Return the state after lines 10 to 13, with ``g = lambda * mean_i(w_t^pr - w~_t^i)``.

        Running statistics are plain means of the sites' own.
        """
        steps, pr = self.config.compute_steps(state.round), self._predict(state)
        delta = weighted_sum(contributions, weigh_equally)
        gradient = -self.config.proximity * delta
        advanced = advance(state.w, pr, gradient, steps, self.apply_prox, scale=self.config.scale_prox)
        w, ag = (torch.where(self._buffers.bits, pr + delta, x) for x in advanced)
        return MetaGaterState(state.round + 1, w, ag, pr)

    def get_sum_weights(self, kind: str) -> Weights:
        return weigh_equally

    def count_paper_scalars(self, sites: int) -> int:
        """Return 2 (|theta| + |phi|) per round and site; the paper reports no traffic."""
        names = [f"site-{number}" for number in range(sites)]
        sampled = len(self.config.sample_training_sites(names, self.seed, 1))
        return 2 * self.config.rounds * sampled * self.layout.num_parameters

    def apply_prox(self, v: Tensor, step: float) -> Tensor:
        """Return the prox of ``step * H`` at ``v`` ``(P,)``; H is the penalty of weight ``lasso`` on the gates."""
        compute = compute_group_lasso_prox if self.config.penalty == "group_lasso" else compute_l1_prox
        return compute(v, self.gates.groups, step * self.config.lasso)

    def measure(self, state: MetaGaterState) -> dict[str, float]:
        """Return ``||Q(w_t^pr, g, beta_t)||^2`` of the last round, the gradient mapping that Theorem 1 bounds."""
        if state.round == 1:
            return {}
        mapping = (state.sent - state.ag)[~self._buffers.bits] / self.config.step
        return {"gradient_mapping": float(mapping.double().square().sum())}

    def model(self, state: MetaGaterState) -> Patch:
        """Return w_t^pr, which round t sends; after the last round the sequence that ``output`` names."""
        is_over = state.round > self.config.rounds
        if is_over and self.config.output == "pr":
            vector = state.sent
        elif is_over and self.config.output == "ag":
            vector = state.ag
        else:
            vector = self._predict(state)
        if self.config.closed_channels == "reopenable":
            return Patch.from_vector(vector, Mask.full(self.layout.size))
        return Patch.from_vector(vector, Mask.full(self.layout.size) - self.gates.select_closed(vector))

    def _predict(self, state: MetaGaterState) -> Tensor:
        return predict(state.w, state.ag, self.config.compute_steps(state.round).alpha)

    @cached_property
    def gates(self) -> Gates:
        return Gates.from_layout(self.layout)

    @cached_property
    def _buffers(self) -> Mask:
        return Mask.from_tensors(self.layout, lambda tensor: tensor.role == "buffer")


@final
class MetaGater(MetaLearningMethod[MetaLearningConfig]):
    """Target sites adapt the gates first, then the backbone behind them."""

    name = "metagater"
    Config = MetaLearningConfig

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        """Take one step of the gates, then one of the backbone behind the new gates (section 3.3).

        Both steps run on the network without the permanently closed channels, which neither of them changes.
        """
        gates = self.gates.phi & trainable
        smaller, live = site.remove_channels(self.gates.find_closed_channels(trainable))
        stages = [Mask(live.take(stage.bits)) for stage in (gates, trainable - self.gates.phi)]
        return live.put(take_one_step(smaller, smaller.weights, stages, self.config), site.weights.clone())


class MetaSNIPConfig(MetaLearningConfig):
    sparsity: float = Field(0.25, ge=0, lt=1)
    """share of the pruned layers' channels or weights"""
    unit: Literal["channel", "weight"] = "channel"
    """what SNIP scores and prunes"""
    layers: tuple[str, ...] = ()
    """convolutions to prune, such as '2.0.conv'; none given: all"""


@final
class MetaSNIP(MetaLearningMethod[MetaSNIPConfig]):
    """Rounds as in MetaGater; a target scores its channels once, prunes the lowest and takes one masked step."""

    name = "metasnip"
    Config = MetaSNIPConfig

    def __init__(self, config: MetaSNIPConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._convolutions = self._find_convolutions()

    def answer(self, request: Request, site: Site) -> Update:
        update = super().answer(request, site)
        if request.kind != ADAPT:
            return update
        metrics = {**update.metrics, "pruned": self._pruned_fraction}
        return Update(update.patch, update.content, update.num_examples, metrics)

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        """Prune by one SNIP pass over the site's examples, then take one step inside the mask."""
        live = trainable - self.select_pruned(site)
        return take_one_step(site, site.weights * live.bits, [live], self.config)

    def select_pruned(self, site: Site) -> Mask:
        """Return the entries to prune: in each layer the units of the lowest summed ``|w * grad|``."""
        batch_size = self.config.adapt_batch or max(site.trainer.num_examples, 1)
        scores = compute_saliency(site, site.weights, batch_size=batch_size, batches=1, t=0)
        bits = torch.zeros(self.layout.size, dtype=torch.bool)
        for indices in self._units:
            lowest = top_k(-scores[indices].sum(1), floor_fraction(self.config.sparsity, len(indices)))
            bits[indices[lowest.bits]] = True
        return Mask(bits)

    @property
    def _pruned_fraction(self) -> float:
        """The share of units that is pruned, in whole units of each layer."""
        units = [len(indices) for indices in self._units]
        return sum(floor_fraction(self.config.sparsity, n) for n in units) / max(sum(units), 1)

    def _find_convolutions(self) -> dict[str, TensorSpec]:
        """Return the weights of the layers to prune, by the layer's name.

        Raises:
            ConfigError: ``layers`` names a layer that is no convolution.
        """
        convolutions = {t.name.removesuffix(".weight"): t for t in self.layout.tensors if _is_convolution(t)}
        if unknown := [name for name in self.config.layers if name not in convolutions]:
            raise ConfigError(
                f"method.layers: there is no convolution {unknown[0]!r}.{suggest(unknown[0], convolutions)} There are: "
                f"{', '.join(convolutions) or 'none'}"
            )
        return {name: convolutions[name] for name in self.config.layers or convolutions}

    @cached_property
    def _units(self) -> list[Tensor]:
        """Indices ``(units, n)`` of the units of each layer to prune."""
        return [self._list_units(name, weight) for name, weight in self._convolutions.items()]

    def _list_units(self, name: str, weight: TensorSpec) -> Tensor:
        """Return indices ``(units, n)`` of the filters, each with its bias, or of the single weights."""
        offsets = dict(zip((tensor.name for tensor in self.layout.tensors), self.layout.offsets, strict=False))
        indices = torch.arange(offsets[weight.name], offsets[weight.name] + weight.size)
        if self.config.unit == "weight":
            return indices.reshape(-1, 1)
        groups, bias = self.layout.transposed_groups.get(weight.name, 0), f"{name}.bias"
        outputs = weight.shape[1] * groups if groups else weight.shape[0]
        section = GroupSection("weight", outputs, (weight.name,), groups)
        filters = section.view_by_group(indices.view(weight.shape)).reshape(outputs, -1)
        if bias not in offsets:
            return filters
        biases = torch.arange(offsets[bias], offsets[bias] + outputs).reshape(-1, 1)
        return torch.cat([filters, biases], dim=1)


def _is_convolution(tensor: TensorSpec) -> bool:
    return tensor.role == "weight" and len(tensor.shape) > 2
