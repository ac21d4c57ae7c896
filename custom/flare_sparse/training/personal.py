"""Tensors of a network that stay at a site: neither the wire nor the server knows them.

FedBN (Li et al. 2021, arXiv 2102.07623) keeps the normalisation layers at the sites, FedPer (Arivazhagan et al. 2019,
arXiv 1912.00818) the last layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
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

    Args:
        inner: trains the tensors that travel.
        model: the network that it trains.
        initial: values of the tensors at a site that has not trained yet, by name, parameters before buffers.
    """

    def __init__(self, inner: Trainer, model: FlatModel, initial: Mapping[str, Tensor]):
        super().__init__(inner)
        # Read the layout first: training freezes tensors, and frozen tensors are left out of it.
        self._network = Layout.from_module(model.module)
        self._tensors = PersonalTensors(model.module, tuple(initial))
        self._initial = torch.cat([tensor.reshape(-1) for tensor in initial.values()])
        self._evaluated: Mapping[str, Tensor] | None = None
        model.after_load = self._load

    def train(self, training: Training) -> Tensor:
        config = training.config
        step = self._tensors.build_step(partial(config.build_optimizer, t=training.round), config.clip_norm)

        def after_step() -> None:
            step()
            training.after_step()

        trained = self._inner.train(replace(training, after_step=after_step))
        # A trial leaves no trace.
        if not training.stream:
            self.memory[PERSONAL] = self._tensors.to_vector()
        return trained

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        self._evaluated = memory
        try:
            return self._inner.evaluate(weights, memory)
        finally:
            self._evaluated = None

    def complete(self, weights: Tensor, memory: Mapping[str, Tensor]) -> tuple[Layout, Tensor]:
        tensors = self.layout.unflatten(weights) | self._tensors.unflatten(self._get_values(memory))
        return self._network, self._network.flatten(tensors)

    def _load(self) -> None:
        self._tensors.load(self._get_values(self.memory if self._evaluated is None else self._evaluated))

    def _get_values(self, memory: Mapping[str, Tensor]) -> Tensor:
        return memory.get(PERSONAL, self._initial)


class PersonalTensors:
    """Tensors of a site's network outside the layout that is exchanged, as one vector.

    Args:
        module: the site's network; its tensors of these names become views of one vector.
        names: their names, parameters before buffers.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]):
        self._names = names
        parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        self._parameters = [parameters[name] for name in names if name in parameters]
        self._buffers = [buffers[name] for name in names if name in buffers]
        size, device = sum(p.numel() for p in self._parameters), next(module.parameters()).device
        self._flat = nn.Parameter(torch.zeros(size, device=device))
        self._flat.grad = torch.zeros_like(self._flat)
        pieces = [p.numel() for p in self._parameters]
        views = zip(self._parameters, self._flat.data.split(pieces), self._flat.grad.split(pieces), strict=True)
        for parameter, data, gradient in views:
            parameter.data, parameter.grad = data.view(parameter.shape), gradient.view(parameter.shape)

    @torch.no_grad()
    def load(self, values: Tensor) -> None:
        """Set the network's tensors to ``values`` ``(n,)``."""
        self._flat.copy_(values[: self._flat.numel()])
        offset = self._flat.numel()
        for buffer in self._buffers:
            buffer.copy_(values[offset : offset + buffer.numel()].view(buffer.shape))
            offset += buffer.numel()

    @torch.no_grad()
    def to_vector(self) -> Tensor:
        """Copy the network's tensors into a vector ``(n,)`` on the CPU."""
        return torch.cat([self._flat.detach().cpu(), *(buffer.cpu().reshape(-1) for buffer in self._buffers)])

    def unflatten(self, values: Tensor) -> dict[str, Tensor]:
        """Return ``values`` ``(n,)`` by name, with the shapes of the network's tensors."""
        tensors = [*self._parameters, *self._buffers]
        pieces = values.split([tensor.numel() for tensor in tensors])
        return {name: piece.view(t.shape) for name, piece, t in zip(self._names, pieces, tensors, strict=True)}

    def build_step(
        self, build_optimizer: Callable[..., torch.optim.Optimizer], clip_norm: float | None
    ) -> Callable[[], None]:
        """Return a function that takes one step of a new optimiser along the gradient, and clears the gradient.

        Args:
            build_optimizer: returns an optimiser of a vector, given the entries of each tensor in it.
            clip_norm: largest L2 norm of the gradient; None: no bound.
        """
        optimizer = build_optimizer(self._flat, sizes=[p.numel() for p in self._parameters])
        gradient = self._flat.grad
        assert gradient is not None
        # Gradients of scores or of an interrupted training may be left over.
        gradient.zero_()

        def step() -> None:
            if clip_norm is not None:
                torch.nn.utils.clip_grad_norm_([self._flat], clip_norm)
            optimizer.step()
            gradient.zero_()

        return step
