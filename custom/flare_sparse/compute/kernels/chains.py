"""Convolutions of volumes that the kernels compute, each with the layers that follow it directly."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..structure.graph import Untraceable, trace
from .geometry import build_triple


@dataclass
class Chain:
    """A convolution and the layers that are computed together with it.

    Attributes:
        name: name of the convolution in the network.
        layer: the convolution.
        norm: normalisation of its output.
        pool: max-pooling whose windows do not overlap.
        activation: ReLU or leaky ReLU.
    """

    name: str
    layer: nn.Module
    norm: nn.Module | None = None
    pool: nn.Module | None = None
    activation: nn.Module | None = None

    @property
    def followers(self) -> list[nn.Module]:
        """Layers whose computation is part of the block."""
        return [part for part in (self.norm, self.pool, self.activation) if part is not None]


def find_chains(network: nn.Module) -> list[Chain]:
    """Return the convolutions that the kernels support, with the layers that follow each directly.

    A network whose code cannot be traced, or draws random numbers, yields single layers. Layers are joined only if they
    follow each other in training and in evaluation.
    """
    modules = dict(network.named_modules())
    singles = [Chain(name, module) for name, module in modules.items() if is_supported(module)]
    if is_supported(network) or not singles:
        return singles
    try:
        traced = [_join_layers(graph, modules) for graph in _trace_modes(network)]
    except Untraceable:
        return singles
    first, second = traced
    return [
        chain if chain == first.get(chain.name) == second.get(chain.name) else Chain(chain.name, chain.layer)
        for chain in {**second, **first}.values()
    ]


def _trace_modes(network: nn.Module) -> list[fx.Graph]:
    """Return the graphs of a network in training and in evaluation mode; its own mode stays as it is.

    Raises:
        Untraceable: the network's code depends on its data, or on random numbers, which differ between calls.
    """
    modes = [(module, module.training) for module in network.modules()]
    states = torch.get_rng_state(), random.getstate()
    graphs = []
    try:
        for is_training in (True, False):
            for module, _ in modes:
                module.training = is_training
            graphs.append(trace(network))
        if not torch.equal(torch.get_rng_state(), states[0]) or random.getstate() != states[1]:
            raise Untraceable(f"{type(network).__name__} draws random numbers in its forward pass")
    finally:
        for module, is_training in modes:
            module.training = is_training
        torch.set_rng_state(states[0])
        random.setstate(states[1])
    return graphs


def _join_layers(graph: fx.Graph, modules: dict[str, nn.Module]) -> dict[str, Chain]:
    """Return the chains of a graph by the names of their first layers."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    counts = [node.target for node in calls]
    called_once = {node for node in calls if counts.count(node.target) == 1}
    chains = {}
    for node in calls:
        layer = modules[str(node.target)]
        if is_supported(layer):
            chain = Chain(str(node.target), layer)
            if node in called_once:
                _add_followers(chain, node, modules, called_once)
            chains[chain.name] = chain
    return chains


def _add_followers(chain: Chain, node: fx.Node, modules: dict[str, nn.Module], called_once: set[fx.Node]) -> None:
    layer: Any = chain.layer
    if _has_hooks(layer):
        return
    while len(node.users) == 1:
        (node,) = node.users
        if node not in called_once:
            return
        part = modules[str(node.target)]
        if _has_hooks(part):
            return
        if not chain.followers and _is_supported_norm(part, layer.out_channels):
            chain.norm = part
        elif chain.pool is None and _is_supported_pool(part):
            chain.pool = part
        elif chain.activation is None and _is_supported_activation(part):
            chain.activation = part
        else:
            return


def is_supported(layer: Any) -> bool:
    """Return whether the kernels compute this layer: a convolution of volumes, of one group, padded with zeros."""
    is_plain = _computes_as(layer, nn.Conv3d) and layer.groups == 1 and layer.padding_mode == "zeros"
    return is_plain and not isinstance(layer.padding, str)


def _computes_as(part: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether a layer is of one of these kinds, without a forward pass of its own in its class or instance."""
    return "forward" not in vars(part) and any(
        isinstance(part, kind) and type(part).forward is kind.forward for kind in kinds
    )


def _has_hooks(part: Any) -> bool:
    """Return whether hooks read or change a layer's input, output or gradients, which a block does not show them."""
    return any((part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks))


# torch raises an error where the axes or the channels of two layers do not agree; such layers are left to it.


def _is_supported_norm(part: Any, channels: int) -> bool:
    if not _computes_as(part, nn.InstanceNorm3d, nn.BatchNorm3d) or part.num_features != channels:
        return False
    if isinstance(part, nn.InstanceNorm3d):
        return not part.track_running_stats
    # A momentum of None is a cumulative average, which needs the number of batches.
    return part.track_running_stats and part.momentum is not None


def _is_supported_pool(part: Any) -> bool:
    if not _computes_as(part, nn.MaxPool3d) or part.ceil_mode or part.return_indices:
        return False
    sizes = [build_triple(size) for size in (part.kernel_size, part.stride, part.padding, part.dilation)]
    return sizes == [sizes[0], sizes[0], (0, 0, 0), (1, 1, 1)]


def _is_supported_activation(part: nn.Module) -> bool:
    return _computes_as(part, nn.ReLU, nn.LeakyReLU) and getattr(part, "negative_slope", 0) >= 0
