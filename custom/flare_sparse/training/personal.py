"""Tensors of a network that stay at a site: neither the wire nor the server knows them.

FedBN (Li et al. 2021, arXiv 2102.07623) keeps the normalisation layers at the sites, FedPer (Arivazhagan et al. 2019,
arXiv 1912.00818) the last layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, list_first
from ..core.params import Layout
from ..inputs.scaling import find_site_tensors
from .flat import FlatModel
from .trainer import Trainer, Training, Wrapper

Personal = Literal["norms", "head", "intercept", "site"] | tuple[str, ...]
"""Tensors that stay at the sites: a group, or patterns of names; no pattern: none."""

PERSONAL = "personal"
"""Name of the vector of these tensors in a site's memory."""


def select_personal(layout: Layout, personal: Personal) -> tuple[str, ...]:
    """Return the names of the tensors that stay at the sites, in the order of the layout.

    Args:
        layout: layout of the whole network.
        personal: ``norms``: normalisation layers with their running statistics; ``head``: the last linear or
            convolution layer; ``intercept``: its bias alone; ``site``: what describes the site's own data; otherwise
            patterns such as ``"3.*"``, none of them for no tensor.

    Raises:
        ConfigError: a pattern or group matches no tensor, or no parameter is left to exchange.
    """
    if not personal:
        return ()
    names = [spec.name for spec in layout.tensors]
    if personal == "norms":
        norms = {_get_module(spec.name) for spec in layout.tensors if spec.role == "norm"}
        # A normalisation layer without scale and shift has running statistics all the same.
        statistics = ("running_mean", "running_var")
        selected = {name for name in names if _get_module(name) in norms or name.rpartition(".")[2] in statistics}
    elif personal in ("head", "intercept"):
        weights = [spec.name for spec in layout.tensors if spec.role == "weight"]
        selected = {name for name in names if weights and _get_module(name) == _get_module(weights[-1])}
        if personal == "intercept":
            selected -= set(weights)
    elif personal == "site":
        selected = set(find_site_tensors(layout))
    else:
        selected = {name for name in names if any(fnmatchcase(name, pattern) for pattern in personal)}
    patterns = () if isinstance(personal, str) else personal
    unmatched = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if unmatched or not selected:
        choice = unmatched[0] if unmatched else personal
        raise ConfigError(
            f"method.personal: {choice!r} matches no tensor of the network, which has {list_first(names)}"
        )
    if all(spec.name in selected for spec in layout.tensors if spec.role != "buffer"):
        raise ConfigError("method.personal: every parameter would stay at the sites; use method local_only instead")
    return tuple(name for name in names if name in selected)


def _get_module(name: str) -> str:
    return name.rpartition(".")[0]


class PersonalTrainer(Wrapper):
    """Trains the tensors that stay at the site beside those that travel, and keeps them in the site's memory.

    The parameters among them become views of one vector, along which an optimiser of their own takes its steps.

    Args:
        inner: trains the tensors that travel.
        model: the network that it trains.
        initial: values of the tensors at a site that has not trained yet, by name.
    """

    def __init__(self, inner: Trainer, model: FlatModel, initial: Mapping[str, Tensor]):
        super().__init__(inner)
        # Read the layout first: training freezes tensors, and frozen tensors are left out of it.
        self._network = Layout.from_module(model.module)
        self._own = self._network.drop({spec.name for spec in self._network.tensors} - initial.keys())
        self._tensors = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
        parameters = [self._tensors[spec.name] for spec in self._own.tensors if spec.role != "buffer"]
        self._sizes = [parameter.numel() for parameter in parameters]
        self._flat = nn.Parameter(torch.zeros(sum(self._sizes), device=model.device))
        self._flat.grad = torch.zeros_like(self._flat)
        views = zip(parameters, self._flat.data.split(self._sizes), self._flat.grad.split(self._sizes), strict=True)
        for parameter, data, gradient in views:
            parameter.data, parameter.grad = data.view(parameter.shape), gradient.view(parameter.shape)
        self._initial = self._own.flatten(initial)
        self._evaluated: Mapping[str, Tensor] | None = None
        model.after_load = self._load

    def train(self, training: Training) -> Tensor:
        config, gradient = training.config, self._flat.grad
        assert gradient is not None
        optimizer = config.build_optimizer(self._flat, training.round, self._sizes)
        # Gradients of scores or of an interrupted training may be left over.
        gradient.zero_()

        def after_step() -> None:
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([self._flat], config.clip_norm)
            optimizer.step()
            gradient.zero_()
            training.after_step()

        trained = self._inner.train(replace(training, after_step=after_step))
        # A trial leaves no trace.
        if not training.stream:
            self.memory[PERSONAL] = self._own.flatten({name: tensor.cpu() for name, tensor in self._tensors.items()})
        return trained

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        self._evaluated = memory
        try:
            return self._inner.evaluate(weights, memory)
        finally:
            self._evaluated = None

    def complete(self, weights: Tensor, memory: Mapping[str, Tensor]) -> tuple[Layout, Tensor]:
        tensors = self.layout.unflatten(weights) | self._own.unflatten(memory.get(PERSONAL, self._initial))
        return self._network, self._network.flatten(tensors)

    @torch.no_grad()
    def _load(self) -> None:
        memory = self.memory if self._evaluated is None else self._evaluated
        for name, value in self._own.unflatten(memory.get(PERSONAL, self._initial)).items():
            self._tensors[name].copy_(value)
