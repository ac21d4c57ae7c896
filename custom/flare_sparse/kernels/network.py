"""Computation of a masked network with sparse kernels, in place of its own convolutions and linear layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .block import BlockSpec, Layer, SparseBlock
from .chains import BATCH_NORMS, INSTANCE_NORMS, Chain, build_tuple, count_axes, find_chains
from .cost import Work, is_sparse_faster
from .geometry import Geometry, PaddedVolume, Triple, build_triple
from .plan import LiveWeights

Decide = Callable[[Work], bool]
"""Returns whether the kernels compute a block."""


class Block:
    """Computes a chain with sparse kernels; it stands in for the ``forward`` of the chain's first layer.

    Args:
        chain: layers that it computes.
        live: bool, shape of the layer's weight: the weights that may differ from 0.
        decide: returns whether the kernels compute the layer.

    Attributes:
        is_sparse: whether the kernels computed the last input.
    """

    def __init__(self, chain: Chain, live: Tensor, decide: Decide):
        self.chain, self.live, self.decide = chain, live, decide
        self.count = int(live.sum())
        self.is_sparse = False
        self._border: Triple = (0, 0, 0)
        self._layers: dict[tuple[Any, ...], Layer] = {}

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return the chain's output."""
        if isinstance(self.chain.layer, nn.Linear):
            return self._compute_linear(inputs)
        layer: Any = self.chain.layer
        geometry = Geometry.from_layer(layer, tuple(inputs.shape[2:]))
        self.is_sparse = inputs.dtype == torch.float32 and self.decide(self._build_work(geometry, len(inputs)))
        if not self.is_sparse:
            return self._compute_densely(inputs)
        producer, padded = getattr(inputs, "_padded", (None, None))
        if producer is not None:
            # From the next pass on, the producer writes its output with the border that this layer needs.
            producer._border = geometry.padding
        scale, shift = self._build_affine()
        volume = inputs.reshape(len(inputs), geometry.inputs, *geometry.shape)
        output, buffer = self._apply(volume, scale, shift, self._get_layer(geometry), padded)
        axes = inputs.dim() - 2
        result = output.reshape(*output.shape[:2], *output.shape[5 - axes :]) if axes < 3 else output
        result._padded = self, buffer  # type: ignore[attr-defined]
        return result

    def _apply(
        self, volume: Tensor, scale: Tensor, shift: Tensor, layer: Layer, padded: PaddedVolume | None
    ) -> tuple[Tensor, PaddedVolume]:
        buffers: list[PaddedVolume] = []
        weight = self.chain.layer.weight
        apply: Any = SparseBlock.apply
        output, mean, variance = apply(volume, weight, scale, shift, layer, padded, buffers)
        if layer.spec.norm == "batch":
            self._update_running_statistics(mean[0], variance[0], layer.geometry, len(volume))
        return output, buffers[0]

    def _compute_densely(self, inputs: Tensor) -> Tensor:
        for part in (self.chain.layer, *self.chain.followers):
            compute: Any = type(part).forward
            inputs = compute(part, inputs)
        return inputs

    def _compute_linear(self, inputs: Tensor) -> Tensor:
        """Return the output of a linear layer, computed as a 1x1 convolution over the examples."""
        layer: Any = self.chain.layer
        rows = inputs.reshape(-1, layer.in_features)
        one = (1, 1, 1)
        geometry = Geometry(layer.in_features, layer.out_features, (1, 1, len(rows)), one, one, (0, 0, 0), one)
        self.is_sparse = inputs.dtype == torch.float32 and self.decide(self._build_work(geometry, 1))
        if not self.is_sparse:
            return self._compute_densely(inputs)
        columns = rows.t().contiguous().view(1, layer.in_features, 1, 1, len(rows))
        scale, shift = self._build_affine()
        output, _ = self._apply(columns, scale, shift, self._get_layer(geometry), None)
        return output.view(layer.out_features, len(rows)).t().reshape(*inputs.shape[:-1], layer.out_features)

    def _get_layer(self, geometry: Geometry) -> Layer:
        key = (geometry, self.chain.layer.training, self._border)
        if key not in self._layers:
            live = next((known.live for known in self._layers.values() if known.geometry == geometry), None)
            live = live or LiveWeights.from_mask(self.live, geometry)
            self._layers[key] = Layer(geometry, live, self._build_spec())
        return self._layers[key]

    def _build_work(self, geometry: Geometry, samples: int) -> Work:
        chain = self.chain
        is_training = torch.is_grad_enabled() and chain.layer.training
        return Work(geometry, self.count, samples, chain.norm is not None, chain.pool is not None, is_training)

    def _build_spec(self) -> BlockSpec:
        norm, activation = self.chain.norm, self.chain.activation
        pool: Any = self.chain.pool
        kind: Any = "fixed"
        if isinstance(norm, INSTANCE_NORMS):
            kind = "instance"
        elif norm is not None:
            kind = "batch" if norm.training else "fixed"
        window = (1, 1, 1)
        if pool is not None:
            axes = count_axes(pool)
            window = build_triple((*(1,) * (3 - axes), *build_tuple(pool.kernel_size)[:axes]))
        slope = 1.0 if activation is None else float(getattr(activation, "negative_slope", 0.0))
        return BlockSpec(kind, float(getattr(norm, "eps", 1e-5)), window, slope, self._border)

    def _build_affine(self) -> tuple[Tensor, Tensor]:
        """Return scale and shift ``(outputs,)`` of the block's affine map; those of a norm without them are constant.

        A bias before a normalisation by the output's own statistics has no effect and gets no gradient.
        """
        layer: Any = self.chain.layer
        norm: Any = self.chain.norm
        ones, zeros = torch.ones(len(self.live)), torch.zeros(len(self.live))
        if norm is None:
            return ones, zeros if layer.bias is None else layer.bias
        scale = ones if norm.weight is None else norm.weight
        shift = zeros if norm.bias is None else norm.bias
        uses_running_statistics = isinstance(norm, BATCH_NORMS) and not norm.training
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


def _return_input(inputs: Tensor) -> Tensor:
    return inputs


@contextmanager
def use_sparse_kernels(
    network: nn.Module, live: Mapping[str, Tensor], decide: Decide = is_sparse_faster
) -> Iterator[list[Block]]:
    """Compute a network's convolutions and linear layers with sparse kernels within the context.

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
    blocks = build_blocks(network, live, decide)
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

    Args:
        network: network on the CPU.
        decide: returns whether the kernels compute a layer.
    """
    compiled = copy.deepcopy(network).eval().requires_grad_(requires_grad=False)
    live = {name: parameter != 0 for name, parameter in compiled.named_parameters() if parameter.dim() > 1}
    _replace_forward(build_blocks(compiled, live, decide))
    return compiled


def build_blocks(network: nn.Module, live: Mapping[str, Tensor], decide: Decide = is_sparse_faster) -> list[Block]:
    """Return a block for each layer of a network; arguments as of :func:`use_sparse_kernels`."""
    blocks = []
    for chain in find_chains(network):
        name = f"{chain.name}.weight" if chain.name else "weight"
        if name in live:
            blocks.append(Block(chain, live[name], decide))
    return blocks


def _replace_forward(blocks: Sequence[Block]) -> None:
    for block in blocks:
        block.chain.layer.forward = block
        for part in block.chain.followers:
            part.forward = _return_input
