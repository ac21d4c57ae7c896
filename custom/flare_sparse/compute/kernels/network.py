"""Computation of a masked network with sparse kernels, in place of its own convolutions."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .block import BlockSpec, Layer, SparseBlock
from .chains import Chain, find_chains
from .cost import Work, is_sparse_faster
from .geometry import Geometry, LiveWeights, Window, build_triple

Decide = Callable[[Work], bool]
"""Returns whether the kernels compute a block."""


_DECISIONS = 64
"""Sizes of inputs whose decision a block remembers: inputs of ever new sizes must not fill the memory."""

_PLANS = 4
"""Sizes of inputs whose plan a block keeps: 32 bytes for each live weight."""

_UNKNOWN: Any = object()


class Block:
    """Computes a chain with sparse kernels; it stands in for the ``forward`` of the chain's first layer.

    What depends only on the sizes of the input, the modes of the layers, the gradient mode and the number of torch's
    threads is computed once.

    Args:
        chain: layers that it computes.
        live: bool, shape of the layer's weight: the weights that may differ from 0.
        decide: returns whether the kernels compute the layer; it depends on its argument alone.
        follows_weights: compare the weights with ``live`` in each call; if they have changed, those that are not 0
            become the live ones.

    Attributes:
        is_sparse: whether the kernels have computed an input since this was last set.
    """

    def __init__(self, chain: Chain, live: Tensor, decide: Decide, *, follows_weights: bool = False):
        self.chain, self.decide, self.follows_weights = chain, decide, follows_weights
        self.is_sparse = False
        self._parts: list[tuple[Any, nn.Module]] = [
            (type(part).forward, part) for part in (chain.layer, *chain.followers)
        ]
        self._set_live(live)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the chain's output."""
        geometry = self._find_geometry(inputs)
        if self.follows_weights and self._has_other_weights(is_sparse=geometry is not None):
            weight: Any = self.chain.layer.weight
            self._set_live(weight.detach() != 0)
            geometry = self._find_geometry(inputs)
        if geometry is None:
            return self._compute_densely(inputs)
        self.is_sparse = True
        return self._apply(inputs, geometry)

    def _set_live(self, live: Tensor) -> None:
        weight: Any = self.chain.layer.weight
        self.live, self.count, self._version = live, int(live.sum()), (weight.data_ptr(), weight._version)
        self._geometries: dict[tuple[Any, ...], Geometry | None] = {}
        self._plans: dict[Geometry, LiveWeights] = {}

    def _has_other_weights(self, *, is_sparse: bool) -> bool:
        """Return whether other weights than the live ones differ from 0.

        Where the kernels compute, the values are compared, which takes 0.1 ms for 10^6 weights: an edit through
        ``weight.data`` leaves the tensor's version as it was. torch's result is right with any weights, so there they
        are compared only after the version has changed.
        """
        weight: Any = self.chain.layer.weight
        version = weight.data_ptr(), weight._version
        if not is_sparse and version == self._version:
            return False
        self._version = version
        return weight.device.type == "cpu" and not np.array_equal(weight.detach().numpy() != 0, self.live.numpy())

    def _find_geometry(self, inputs: Tensor) -> Geometry | None:
        """Return the sizes of the layer; None: torch computes this input."""
        layer, norm = self.chain.layer, self.chain.norm
        key = (
            inputs.shape, inputs.dtype, inputs.device, layer.weight.dtype, layer.training,
            norm is not None and norm.training, torch.is_grad_enabled(), torch.get_num_threads(),
        )  # fmt: skip
        # One look-up: another thread may empty the cache at any time.
        geometry: Geometry | None = self._geometries.get(key, _UNKNOWN)
        if geometry is _UNKNOWN:
            geometry = self._build_geometry(tuple(inputs.shape))
            is_float = inputs.dtype == layer.weight.dtype == torch.float32 and inputs.device.type == "cpu"
            samples = len(inputs) if inputs.dim() else 0
            if geometry is not None and not (
                is_float and self._has_values(geometry, samples) and self.decide(self._build_work(geometry, samples))
            ):
                geometry = None
            _remember(self._geometries, key, geometry, _DECISIONS)
        return geometry

    def _build_geometry(self, shape: tuple[int, ...]) -> Geometry | None:
        """Return the sizes of the layer for an input ``shape``; None: it is without a batch, or torch rejects it."""
        layer: Any = self.chain.layer
        if len(shape) != 5 or shape[1] != layer.in_channels:
            return None
        return Geometry.from_layer(layer, shape[2:])

    def _has_values(self, geometry: Geometry, samples: int) -> bool:
        """Return whether there are values to compute, and enough for their statistics; if not, torch may raise."""
        spec = self._build_spec()
        pooled = (size // window for size, window in zip(geometry.output_shape, spec.window, strict=True))
        sizes = (samples, geometry.inputs, geometry.outputs, *geometry.shape, *geometry.output_shape, *pooled)
        values = prod(geometry.output_shape) * (samples if spec.norm == "batch" else 1)
        return min(sizes) > 0 and (spec.norm == "fixed" or values > 1)

    def _apply(self, volume: Tensor, geometry: Geometry) -> Tensor:
        """Return the output ``(samples, outputs, depth, height, width)``."""
        layer = self._get_layer(geometry)
        scale, shift = self._build_affine()
        apply: Any = SparseBlock.apply
        # torch turns gradients off within an autograd function, so it is told whether they are on.
        output, mean, variance = apply(volume, self.chain.layer.weight, scale, shift, layer, torch.is_grad_enabled())
        if layer.spec.norm == "batch":
            self._update_running_statistics(mean[0], variance[0], geometry, len(volume))
        result: Tensor = output
        return result

    def _compute_densely(self, inputs: Tensor) -> Tensor:
        for compute, part in self._parts:
            inputs = compute(part, inputs)
        return inputs

    def _get_layer(self, geometry: Geometry) -> Layer:
        live = self._plans.get(geometry)
        if live is None:
            live = LiveWeights.from_mask(self.live, geometry)
            _remember(self._plans, geometry, live, _PLANS)
        return Layer(geometry, live, self._build_spec())

    def _build_work(self, geometry: Geometry, samples: int) -> Work:
        chain = self.chain
        is_training = torch.is_grad_enabled() and chain.layer.training
        flags = chain.norm is not None, chain.pool is not None, is_training
        return Work(geometry, self.count, samples, *flags, threads=torch.get_num_threads())

    def _build_spec(self) -> BlockSpec:
        norm, activation = self.chain.norm, self.chain.activation
        pool: Any = self.chain.pool
        kind: Any = "fixed"
        if isinstance(norm, nn.InstanceNorm3d):
            kind = "instance"
        elif norm is not None:
            kind = "batch" if norm.training else "fixed"
        window = Window(*build_triple(1 if pool is None else pool.kernel_size))
        slope = 1.0 if activation is None else float(getattr(activation, "negative_slope", 0.0))
        return BlockSpec(kind, float(getattr(norm, "eps", 1e-5)), window, slope)

    def _build_affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift ``(outputs,)`` of the block's affine map: 1 and 0 where the layers have none.

        Batch normalisation in eval mode is part of the map. A bias before any other normalisation has no effect, so it
        is left out and gets no gradient.
        """
        layer: Any = self.chain.layer
        norm: Any = self.chain.norm
        ones, zeros = torch.ones(len(self.live)), torch.zeros(len(self.live))
        if norm is None:
            return ones, zeros if layer.bias is None else layer.bias
        scale = ones if norm.weight is None else norm.weight
        shift = zeros if norm.bias is None else norm.bias
        uses_running_statistics = isinstance(norm, nn.BatchNorm3d) and not norm.training
        if uses_running_statistics:
            mean = norm.running_mean if layer.bias is None else norm.running_mean - layer.bias
            scale = scale * torch.rsqrt(norm.running_var + norm.eps)
            shift = shift - mean * scale
        return scale, shift

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, geometry: Geometry, samples: int) -> None:
        norm: Any = self.chain.norm
        bias: Any = self.chain.layer.bias
        count = samples * prod(geometry.output_shape)
        norm.running_mean.lerp_(mean if bias is None else mean + bias, norm.momentum)
        norm.running_var.lerp_(variance * (count / max(count - 1, 1)), norm.momentum)
        norm.num_batches_tracked.add_(1)


def _remember(cache: dict[Any, Any], key: object, value: object, limit: int) -> None:
    """Store a value; a full cache is emptied first."""
    if len(cache) >= limit:
        cache.clear()
    cache[key] = value


def _return_input(inputs: Tensor) -> Tensor:
    return inputs


@contextmanager
def use_sparse_kernels(
    network: nn.Module, live: Mapping[str, Tensor], decide: Decide = is_sparse_faster
) -> Iterator[list[Block]]:
    """Compute a network's convolutions with sparse kernels within the context.

    The network's modules, parameters and buffers stay as they are; only the ``forward`` of the layers changes. The
    gradient of a weight that is not live is 0.

    Args:
        network: network on the CPU; all weights that are not live are 0.
        live: bool by parameter name, with the parameter's shape: weights that may differ from 0. Layers without an
            entry are computed by the network itself.
        decide: returns whether the kernels compute a layer.

    Yields:
        A block for each layer.
    """
    blocks = build_blocks(find_chains(network), live, decide)
    with install_blocks(blocks):
        yield blocks


@contextmanager
def install_blocks(blocks: Sequence[Block]) -> Iterator[None]:
    """Let blocks compute the layers of their network within the context."""
    _replace_forward(blocks)
    try:
        yield
    finally:
        for block in blocks:
            for part in (block.chain.layer, *block.chain.followers):
                part.__dict__.pop("forward", None)


def compile_network(network: nn.Module, decide: Decide = is_sparse_faster) -> nn.Module:
    """Return a copy of a network for inference that computes with sparse kernels; weights that are 0 are skipped.

    The copy may be changed as any network, such as by ``load_state_dict``: each call reads the weights anew. Hooks are
    for the network before it is compiled: a hook that is added to the copy sees what a block computes as a whole.

    Args:
        network: network on the CPU.
        decide: returns whether the kernels compute a layer.
    """
    compiled = copy.deepcopy(network).eval().requires_grad_(requires_grad=False)
    live = {name: parameter != 0 for name, parameter in compiled.named_parameters() if parameter.dim() > 1}
    _replace_forward(build_blocks(find_chains(compiled), live, decide, follows_weights=True))
    return compiled


def build_blocks(
    chains: Iterable[Chain],
    live: Mapping[str, Tensor],
    decide: Decide = is_sparse_faster,
    *,
    follows_weights: bool = False,
) -> list[Block]:
    """Return a block for each chain of a network whose weight is in ``live``; arguments as of :class:`Block`."""
    blocks = []
    for chain in chains:
        name = f"{chain.name}.weight" if chain.name else "weight"
        if name in live:
            blocks.append(Block(chain, live[name], decide, follows_weights=follows_weights))
    return blocks


def _replace_forward(blocks: Sequence[Block]) -> None:
    for block in blocks:
        block.chain.layer.forward = block
        for part in block.chain.followers:
            part.forward = _return_input
