"""MetaSNIP (Lin et al. 2021), section 5.3: MetaGater's backbone without gates, pruned once by SNIP at each target.

A baseline of "MetaGater: Fast Learning of Conditional Channel Gated Networks via Federated Meta-Learning", arXiv
2011.12511; docs/algorithms.md, section 6.10.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, final

import torch
from pydantic import Field
from torch import Tensor

from ..core.errors import ConfigError, suggest
from ..core.exchange import Contribution, Patch, Request, Update
from ..core.mask import Mask, floor_fraction, top_k
from ..core.params import Layout, TensorSpec
from ..training import Site
from .aggregation.weighted import Weights
from .metagater import MetaGater, MetaGaterState
from .scores.scbf.groups import GroupSection
from .scores.snip import compute_saliency
from .support.adaptation import ADAPT, AdaptationMethod, take_one_step
from .support.meta_learning import MetaLearningConfig


class MetaSNIPConfig(MetaLearningConfig):
    sparsity: float = Field(0.25, ge=0, lt=1, description="share of the pruned layers' channels or weights")
    unit: Literal["channel", "weight"] = Field("channel", description="what SNIP scores and prunes")
    layers: tuple[str, ...] = Field((), description="convolutions to prune, such as '2.0.conv'; none given: all")


@final
class MetaSNIP(AdaptationMethod[MetaSNIPConfig, MetaGaterState]):
    """Rounds as in MetaGater; a target scores its channels once, prunes the lowest and takes one masked step."""

    name = "metasnip"
    Config = MetaSNIPConfig
    update_content = "delta"

    def __init__(self, config: MetaSNIPConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._metagater = MetaGater(config, layout, seed)
        self._convolutions = self._find_convolutions()

    def init(self, weights: Tensor, sites: Sequence[str]) -> MetaGaterState:
        return self._metagater.init(weights, sites)

    def train(self, request: Request, site: Site) -> Update:
        return self._metagater.train(request, site)

    def answer(self, request: Request, site: Site) -> Update:
        update = super().answer(request, site)
        if request.kind != ADAPT:
            return update
        metrics = {**update.metrics, "pruned": self._pruned_fraction}
        return Update(update.patch, update.content, update.num_examples, metrics)

    def learn(self, state: MetaGaterState, contributions: Sequence[Contribution]) -> MetaGaterState:
        return self._metagater.learn(state, contributions)

    def get_sum_weights(self, kind: str) -> Weights:
        return self._metagater.get_sum_weights(kind)

    def count_paper_scalars(self, sites: int) -> int:
        return self._metagater.count_paper_scalars(sites)

    def model(self, state: MetaGaterState) -> Patch:
        return self._metagater.model(state)

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
