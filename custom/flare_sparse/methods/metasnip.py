"""MetaSNIP (Lin et al. 2021, section 5.3): MetaGater's backbone without gates, pruned once by SNIP at each target."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import ConfigError, suggest
from ..exchange import Assignment, Contribution, Patch, Request, Update
from ..mask import Mask, floor_fraction, top_k
from ..params import Layout, TensorSpec
from ..scores.snip import compute_saliency
from ..training import Site
from .metagater import Config as MetaGaterConfig
from .metagater import MetaGater, State
from .method import Method
from .support.adaptation import ask_to_adapt, report_adaptation, take_one_step


class Config(MetaGaterConfig):
    sparsity: float = Field(0.25, ge=0, lt=1, description="share of the pruned layers' channels or weights that goes")
    unit: Literal["channel", "weight"] = Field("channel", description="what SNIP scores and prunes")
    layers: tuple[str, ...] = Field((), description="convolutions to prune, such as '2.0.conv'; none given: all")


class MetaSNIP(Method[State]):
    """Rounds as in MetaGater; a target scores its channels once, prunes the lowest and takes one masked step."""

    name = "metasnip"
    Config = Config

    def __init__(self, config: MetaGaterConfig, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self._metagater = MetaGater(config, layout, seed)

    def init(self, weights: Tensor, sites: Sequence[str]) -> State:
        return self._metagater.init(weights, sites)

    def ask(self, state: State, sites: Sequence[str]) -> dict[str, Assignment] | None:
        return self._metagater.ask(state, sites)

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != "adapt":
            return self._metagater.answer(request, site)
        update = report_adaptation(site, self.adapt(site, request.trainable))
        return Update(update.patch, update.content, update.num_examples, {**update.metrics, "pruned": self._pruned})

    def learn(self, state: State, updates: Sequence[Contribution]) -> State:
        return self._metagater.learn(state, updates)

    def adapt(self, site: Site, trainable: Mask) -> Tensor:
        """One SNIP pass on the site's examples, then one step inside the mask."""
        kept = trainable - self.pruned(site)
        return take_one_step(site, site.weights * kept.bits, [kept], self.config)

    def pruned(self, site: Site) -> Mask:
        """The entries that go: in each layer the channels (filter and bias) or weights of the lowest ``|w * grad|``."""
        batch = self.config.adapt_batch or max(site.num_examples, 1)
        scores = compute_saliency(site, site.weights, batch_size=batch, batches=1, t=0)
        gone = torch.zeros(self.layout.size, dtype=torch.bool)
        for members in self._units:
            lowest = top_k(-scores[members].sum(1), floor_fraction(self.config.sparsity, len(members)))
            gone[members[lowest.bits]] = True
        return Mask(gone)

    @property
    def _pruned(self) -> float:
        """The share of units that goes, as it is possible in whole ones."""
        units = [len(members) for members in self._units]
        return sum(floor_fraction(self.config.sparsity, n) for n in units) / max(sum(units), 1)

    @cached_property
    def _units(self) -> list[Tensor]:
        """Per pruned layer, indices ``(units, n)``."""
        found = {e.name.removesuffix(".weight"): e for e in self.layout.tensors if _convolution(e)}
        if unknown := [name for name in self.config.layers if name not in found]:
            raise ConfigError(
                f"method.layers: there is no convolution {unknown[0]!r}.{suggest(unknown[0], found)} There are: "
                f"{', '.join(found) or 'none'}"
            )
        return [self._members(name, found[name]) for name in self.config.layers or found]

    def _members(self, name: str, weight: TensorSpec) -> Tensor:
        start = dict(zip((e.name for e in self.layout.tensors), self.layout.offsets, strict=False))
        rows = torch.arange(start[weight.name], start[weight.name] + weight.size)
        if self.config.unit == "weight":
            return rows.reshape(-1, 1)
        rows, bias = rows.reshape(weight.shape[0], -1), f"{name}.bias"
        if bias not in start:
            return rows
        return torch.cat([rows, torch.arange(start[bias], start[bias] + weight.shape[0]).reshape(-1, 1)], dim=1)

    def model(self, state: State) -> Patch:
        return self._metagater.model(state)

    def ask_final(self, state: State, sites: Sequence[str]) -> dict[str, Assignment]:
        return ask_to_adapt(self.model(state), sites, self.config)

    def count_paper_scalars(self, sites: int) -> int | None:
        return self._metagater.count_paper_scalars(sites)


def _convolution(entry: TensorSpec) -> bool:
    return entry.role == "weight" and len(entry.shape) > 2
