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
from typing import Literal, Self, TypeVar, final

import torch
from pydantic import Field
from torch import Tensor

from ..core.errors import ConfigError, suggest
from ..core.exchange import Contribution, Patch, Request, Update
from ..core.mask import Mask, floor_fraction, top_k
from ..core.needs import Need, Needs
from ..core.params import Layout
from ..training import Site
from .aggregation.weighted import Weights, weigh_equally, weighted_sum
from .method import train_locally
from .scores.snip import compute_saliency
from .support.adaptation import ADAPT, AdaptationConfig, AdaptationMethod, take_one_step

Prox = Callable[[Tensor, float], Tensor]


class MetaLearningConfig(AdaptationConfig):
    """Settings of the sites' proximal problem, of the server's accelerated steps and of the gates' penalty."""

    proximity: float = Field(0.2, gt=0)
    """lambda: weight of the distance to the meta-model"""
    local_proximity: float | None = Field(None, ge=0)
    """lambda in the sites' problem; null: as proximity"""
    local_accuracy: float | None = Field(None, gt=0)
    """xi_t: squared norm of the gradient of a site's proximal problem at which it stops, local_steps or training.epochs
    at the latest; null: no other end"""
    step: float = Field(1.0, gt=0)
    """beta_t, the server's step; eta_t = beta_t / alpha_t"""
    momentum_cap: float = Field(1.0, ge=0, le=1)
    """largest momentum of the acceleration; 1: as in the paper; 0: none, alpha_t = 1, which is FedProx with step
    1 / lambda, and Reptile with less"""
    lasso: float = Field(1e-4, ge=0)
    """mu: weight of the penalty H on the gates' output channels"""
    penalty: Literal["group_lasso", "l1"] = "group_lasso"
    """H: group_lasso closes whole channels, l1 zeroes single weights of their gates"""
    scale_prox: bool = True
    """true: the penalty's threshold grows with eta_t, as in the paper; false: with beta_t"""
    closed_channels: Literal["permanent", "reopenable"] = "reopenable"
    """reopenable: a zero group is sent and may grow again, as in the paper; permanent: neither it nor its filter is
    sent or trained again"""
    output: Literal["pr", "ag"] = "pr"
    """the result: the model last sent (the paper), or w_T^ag"""

    def needs(self) -> Needs:
        if self.local_accuracy is None:
            return super().needs()
        return super().needs() | {
            Need.PLAIN_STEPS.because("local_accuracy: a gradient ends the training", "leave it out")
        }

    def compute_alpha(self, t: int) -> float:
        """Return ``alpha_t = 2 / (t + 1)`` (Lin et al. 2021, 5.1), the weight of ``w`` in the prediction, or more.

        It is at least ``1 - momentum_cap``. At a cap of 0 alpha is 1, which makes the three sequences one.
        """
        return max(2 / (t + 1), 1 - self.momentum_cap)


_GATE_SUFFIX = ".gate.open.weight"


@dataclass(frozen=True)
class Gates:
    """The gated layers of a layout. A gated layer ``L`` has its gate in ``L.gate`` and its filters in ``L.body``.

    Attributes:
        phi: all parameters of the gates; everything else is the backbone theta.
        groups: the groups of the Group Lasso, indices ``(channels, hidden + 1)`` for each gated layer: a row of the
            gate's last weight and its bias. A channel whose group is zero is closed for every input.
        filters: what computes a channel (filter, bias, affine of the norm), indices ``(channels, n)`` for each gated
            layer.
    """

    phi: Mask
    groups: tuple[Tensor, ...]
    filters: tuple[Tensor, ...]

    @classmethod
    def from_layout(cls, layout: Layout) -> Self:
        """Return the gates of a layout; MetaGater without gating where there is none."""
        layers = [t.name.removesuffix(_GATE_SUFFIX) for t in layout.tensors if t.name.endswith(_GATE_SUFFIX)]
        prefixes = tuple(f"{layer}.gate." for layer in layers)
        phi = Mask.from_tensors(layout, lambda tensor: bool(prefixes) and tensor.name.startswith(prefixes))
        groups = tuple(_list_channels(layout, f"{layer}.gate.open.") for layer in layers)
        filters = tuple(_list_channels(layout, f"{layer}.body.", buffers=False) for layer in layers)
        return cls(phi, groups, filters)

    def select_closed(self, vector: Tensor) -> Mask:
        """Return the groups that are zero in ``vector`` ``(P,)``, and their filters; these entries have no effect."""
        bits = torch.zeros(vector.numel(), dtype=torch.bool)
        for groups, filters in zip(self.groups, self.filters, strict=True):
            is_zero = ~vector[groups].any(1)
            bits[groups[is_zero]] = True
            bits[filters[is_zero]] = True
        return Mask(bits)


def _list_channels(layout: Layout, prefix: str, *, buffers: bool = True) -> Tensor:
    """Return indices ``(channels, n)`` of the tensors with a prefix, whose first axis is the channel."""
    parts = [
        torch.arange(start, start + tensor.size).reshape(tensor.shape[0], -1)
        for tensor, start in zip(layout.tensors, layout.offsets, strict=False)
        if tensor.name.startswith(prefix) and (buffers or tensor.role != "buffer")
    ]
    return torch.cat(parts, dim=1)


def compute_group_lasso_prox(v: Tensor, groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Return the prox of ``threshold * sum_g sqrt(|g|) ||v_g||``: each group shrinks towards zero or becomes zero.

    ``v_g <- max(0, 1 - threshold * sqrt(|g|) / ||v_g||) v_g`` (Yuan and Lin 2006), with exact zeros where the norm is
    at most the threshold.

    Args:
        v: ``(P,)``, which is not changed.
        groups: index tensors ``(groups, entries)``, disjoint; all other entries are not penalised.
        threshold: step times the weight of the penalty, at least 0.
    """
    if not threshold or not groups:
        return v
    result = v.clone()
    for indices in groups:
        members = v[indices]
        norms = torch.linalg.vector_norm(members, dim=1, keepdim=True)
        limit = threshold * indices.shape[1] ** 0.5
        # A comparison, not a clamp, so that a group at the limit is exactly zero; clamp_min avoids 0 / 0 in the
        # branch that ``where`` discards.
        factors = torch.where(
            norms > limit, 1 - limit / norms.clamp_min(torch.finfo(v.dtype).tiny), torch.zeros_like(norms)
        )
        result[indices] = members * factors
    return result


def compute_l1_prox(v: Tensor, groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Return the prox of ``threshold * sum |v_i|`` over the entries of the groups: soft thresholding.

    ``v_i <- sign(v_i) max(0, |v_i| - threshold)``, with exact zeros at or below the threshold.

    Args:
        v: ``(P,)``, which is not changed.
        groups: index tensors of the penalised entries, disjoint.
        threshold: step times the weight of the penalty, at least 0.
    """
    result = v.clone()
    for indices in groups:
        result[indices] = torch.nn.functional.softshrink(v[indices], threshold)
    return result


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


def advance(
    w: Tensor, pr: Tensor, g: Tensor, alpha: float, beta: float, prox: Prox, *, scale: bool = True
) -> tuple[Tensor, Tensor]:
    """Return w_t and w_t^ag (lines 10 to 13): proximal steps along ``g`` from w_{t-1} and from w_t^pr.

    Args:
        w: ``(P,)`` w_{t-1}.
        pr: ``(P,)`` w_t^pr.
        g: ``(P,)`` gradient of the sites' envelopes.
        alpha: alpha_t, which gives the length of the step from w_{t-1}: ``alpha_t * eta_t = beta_t``.
        beta: beta_t, the length of the step from w_t^pr.
        prox: proximal operator of ``step * H`` for a given step.
        scale: False: the thresholds of both operators grow with beta_t.
    """
    eta = beta / alpha
    return prox(w - eta * g, eta if scale else beta), prox(pr - beta * g, beta)


ConfigT = TypeVar("ConfigT", bound=MetaLearningConfig)


class MetaLearningMethod(AdaptationMethod[ConfigT, MetaGaterState]):
    """Sites solve a proximal problem in a few steps; the server takes accelerated proximal steps on their deltas."""

    update_content = "delta"

    def init(self, weights: Tensor, sites: Sequence[str]) -> MetaGaterState:
        return MetaGaterState(1, weights, weights, weights)

    def train(self, request: Request, site: Site) -> Update:
        own = self.config.local_proximity
        return train_locally(
            request,
            site,
            self.config.get_training(request.round),
            self.update_content,
            steps=self.config.local_steps,
            proximal_strength=self.config.proximity if own is None else own,
            tolerance=self.config.local_accuracy,
        )

    def learn(self, state: MetaGaterState, contributions: Sequence[Contribution]) -> MetaGaterState:
        """Return the state after lines 10 to 13, with ``g = lambda * mean_i(w_t^pr - w~_t^i)``.

        Running statistics are plain means of the sites' own.
        """
        alpha, pr = self.config.compute_alpha(state.round), self._predict(state)
        delta = weighted_sum(contributions, weigh_equally)
        gradient = -self.config.proximity * delta
        step, scale = self.config.step, self.config.scale_prox
        advanced = advance(state.w, pr, gradient, alpha, step, self.apply_prox, scale=scale)
        w, ag = (torch.where(self._buffers.bits, pr + delta, x) for x in advanced)
        return MetaGaterState(state.round + 1, w, ag, pr)

    def get_sum_weights(self, kind: str) -> Weights:
        return weigh_equally

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
        result = state.sent if self.config.output == "pr" else state.ag
        vector = result if state.round > self.config.rounds else self._predict(state)
        if self.config.closed_channels == "reopenable":
            return Patch.from_vector(vector, Mask.full(self.layout.size))
        return Patch.from_vector(vector, Mask.full(self.layout.size) - self.gates.select_closed(vector))

    def _predict(self, state: MetaGaterState) -> Tensor:
        return predict(state.w, state.ag, self.config.compute_alpha(state.round))

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
        """Take one step of the gates, then one of the backbone behind the new gates (section 3.3)."""
        stages = [self.gates.phi & trainable, trainable - self.gates.phi]
        return take_one_step(site, site.weights, stages, self.config)


class MetaSNIPConfig(MetaLearningConfig):
    sparsity: float = Field(0.25, ge=0, lt=1)
    """share of the pruned layers' channels"""
    layers: tuple[str, ...] = ()
    """convolutions to prune, such as '2.0.conv'; none given: all"""


@final
class MetaSNIP(MetaLearningMethod[MetaSNIPConfig]):
    """Rounds as in MetaGater; a target scores its channels once, prunes the lowest and takes one masked step."""

    name = "metasnip"
    Config = MetaSNIPConfig

    def __init__(self, config: MetaSNIPConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._units = self._list_units()

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
        scores = compute_saliency(site.trainer.compute_gradients(site.weights, batch_size, 1, 0), site.weights)
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

    def _list_units(self) -> list[Tensor]:
        """Return indices ``(units, n)`` of the units of each layer to prune: the filters, each with its bias.

        Raises:
            ConfigError: ``layers`` names a layer that is no convolution.
        """
        # The leading axis of a transposed convolution's weight is that of its inputs.
        weights = [t.name for t in self.layout.tensors if t.role == "weight" and len(t.shape) > 2]
        convolutions = [n.removesuffix(".weight") for n in weights if n not in self.layout.transposed_groups]
        if unknown := [name for name in self.config.layers if name not in convolutions]:
            raise ConfigError(
                f"method.layers: there is no convolution {unknown[0]!r}.{suggest(unknown[0], convolutions)} There are: "
                f"{', '.join(convolutions) or 'none'}"
            )
        return [_list_channels(self.layout, f"{name}.", buffers=False) for name in self.config.layers or convolutions]
