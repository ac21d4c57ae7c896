"""A sparse convolution with the normalisation, pooling and activation that follow it, in one pass over the output.

Per channel, a block computes ``activation(norm(pool(convolution(x))))``. Max-pooling commutes with an affine map of
positive scale and with a monotone activation; where the scale is negative, the minimum is pooled. Only the pooled
values, an eighth of a volume, are written to memory.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError
from . import loops
from .cost import is_storing_faster
from .geometry import Doubles, Floats, Geometry, Integers, LiveWeights, Norm, Part, Triple, Weights, Window
from .threads import run_parts

_WORK_OF_A_VALUE = 32
"""Multiplications that take as long as to read and write a value of a feature map."""


@dataclass(frozen=True)
class BlockSpec:
    """What a block computes after its convolution.

    Attributes:
        norm: ``fixed``: an affine map per channel, such as batch normalisation in eval mode; ``instance``: by the
            statistics of each sample; ``batch``: by those of the minibatch.
        eps: added to the variance.
        window: pooling window; its stride is its size.
        slope: derivative of the activation for negative values: 0 for ReLU, 1 for no activation.
    """

    norm: Literal["fixed", "instance", "batch"]
    eps: float
    window: Window
    slope: float


@dataclass(frozen=True)
class Layer:
    """A block's convolution and what follows it."""

    geometry: Geometry
    live: LiveWeights
    spec: BlockSpec

    @property
    def pooled_shape(self) -> Triple:
        """Spatial size of the block's output."""
        depth, height, width = self.geometry.output_shape
        return depth // self.spec.window[0], height // self.spec.window[1], width // self.spec.window[2]

    @property
    def records_values(self) -> bool:
        """Whether the backward pass reads the convolution's output; with few live weights, it is computed again."""
        return self.spec.norm != "fixed" and is_storing_faster(self.live.count, self.geometry.outputs)

    def count_work(self, starts: Integers) -> Integers:
        """Return the multiplications of a sample before each channel, ``(channels + 1,)``.

        Args:
            starts: ``(channels + 1,)`` first live weight of each channel.
        """
        return (starts + _WORK_OF_A_VALUE * np.arange(len(starts))) * self.geometry.extent

    @property
    def pooled_work(self) -> Integers:
        """As :meth:`count_work`, of a loop that reads and writes the pooled values once."""
        return np.arange(self.geometry.outputs + 1) * (_WORK_OF_A_VALUE * prod(self.pooled_shape))

    def build_weights(self, weight: Tensor) -> Weights:
        """Return the live weights by output channel, with their values."""
        return Weights(self.live.starts, self.live.offsets, weight.detach().reshape(-1)[self.live.index].numpy())


def convolve(
    source: Floats, weights: Weights, layer: Layer, signs: Floats, *, record: bool
) -> tuple[Tensor, Any, Floats, Doubles, Doubles]:
    """Convolve all samples, pool the result and compute the statistics that the normalisation needs.

    Args:
        source: ``(samples, positions)`` from :meth:`Geometry.lay_out`.
        weights: live weights by output channel.
        layer: geometry and what follows.
        signs: ``(outputs,)`` 1: pool the largest value, -1: pool the smallest one.
        record: record what the backward pass needs.

    Returns:
        output: pooled values, ``(samples, outputs, *pooled)``.
        positions: ``(samples, outputs, pooled)`` index of each pooled value in its slab, or of size 0.
        values: ``(samples, outputs, positions)`` the convolution's output before pooling, or of size 0.
        mean: ``(samples, outputs)`` mean of the convolution's output; 0 for a fixed map.
        variance: ``(samples, outputs)`` biased variance; 1 for a fixed map.
    """
    geometry, spec, samples, outputs = layer.geometry, layer.spec, len(source), layer.geometry.outputs
    output = torch.zeros(samples, outputs, *layer.pooled_shape)
    flat = output.flatten(2).numpy()
    recorded = outputs if record and prod(spec.window) > 1 else 0
    positions = np.empty((samples, recorded, prod(layer.pooled_shape)), np.int32)
    values = np.empty((samples, outputs if record and layer.records_values else 0, geometry.extent), np.float32)
    moments = np.zeros((samples, outputs if spec.norm != "fixed" else 0, 2))
    pivots = np.zeros((samples, outputs), np.float32)

    def convolve_part(part: Part) -> None:
        loops.convolve(
            source, weights, geometry.grid, layer.spec.window, signs, pivots, moments, flat, positions, values, part
        )

    run_parts(layer.count_work(layer.live.starts), samples, convolve_part)
    return output, positions, values, *_compute_statistics(layer, moments, pivots)


def _compute_statistics(layer: Layer, moments: Doubles, pivots: Floats) -> tuple[Doubles, Doubles]:
    """Return mean and variance ``(samples, outputs)`` of each map, or with batch normalisation of the batch.

    Args:
        layer: the layer.
        moments: ``(samples, outputs, 2)`` sums of the differences to the pivots, and of their squares.
        pivots: ``(samples, outputs)`` the value that was subtracted before squaring, against cancellation.
    """
    if layer.spec.norm == "fixed":
        return np.zeros(pivots.shape), np.ones(pivots.shape)
    count = prod(layer.geometry.output_shape)
    offset, square = moments[..., 0] / count, moments[..., 1] / count
    mean, variance = pivots + offset, np.maximum(square - offset**2, 0)
    if layer.spec.norm == "batch":
        batch_mean = mean.mean(0, keepdims=True)
        variance = np.broadcast_to((variance + (mean - batch_mean) ** 2).mean(0, keepdims=True), mean.shape)
        mean = np.broadcast_to(batch_mean, mean.shape)
    return mean, variance


class SparseBlock(torch.autograd.Function):
    """Autograd function of a block.

    Its inputs are the feature map ``(samples, inputs, depth, height, width)``, the weight, scale and shift of the
    affine map ``(outputs,)`` each, the :class:`Layer`, and whether gradients are enabled. It returns the output, and
    the mean and variance of the normalisation.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, layer: Layer, is_grad_enabled: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return output, mean and variance."""
        outputs, record = layer.geometry.outputs, is_grad_enabled and any(ctx.needs_input_grad)
        source = layer.geometry.lay_out(inputs.detach()).numpy().reshape(len(inputs), -1)
        weights = layer.build_weights(weight)
        gamma, beta = scale.detach().numpy(), shift.detach().numpy()
        signs = np.where(gamma < 0, np.float32(-1), np.float32(1))
        output, positions, values, mean, variance = convolve(source, weights, layer, signs, record=record)
        inverse = np.ones_like(variance)
        if layer.spec.norm != "fixed":
            inverse = 1 / np.sqrt(variance + layer.spec.eps)
        scales = (gamma * inverse).astype(np.float32)
        shifts = (beta - gamma * inverse * mean).astype(np.float32)
        kept = np.empty((len(inputs), outputs if record else 0, prod(layer.pooled_shape)), np.float32)
        flat = output.flatten(2).numpy()

        def activate_part(part: Part) -> None:
            loops.scale_and_activate(flat, scales, shifts, np.float32(layer.spec.slope), kept, part)

        run_parts(layer.pooled_work, len(inputs), activate_part)
        if record:
            ctx.layer, ctx.source, ctx.weights, ctx.weight_shape = layer, source, weights, weight.shape
            ctx.gamma, ctx.mean, ctx.inverse, ctx.scales, ctx.shifts = gamma, mean, inverse, scales, shifts
            ctx.kept, ctx.positions, ctx.values = kept, positions, values
        kept_mean, kept_variance = (torch.from_numpy(moment.astype(np.float32)) for moment in (mean, variance))
        ctx.mark_non_differentiable(kept_mean, kept_variance)
        return output, kept_mean, kept_variance

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of feature map, weight, scale and shift.

        Raises:
            ConfigError: a graph of the gradient is asked for, as by a penalty on gradients.
        """
        # Enabled here only with create_graph. The result would be a constant for the second derivative.
        if torch.is_grad_enabled():
            raise ConfigError(
                "the sparse kernels have no second derivative, which this loss needs; set training.compute to dense"
            )
        layer: Layer = ctx.layer
        needs_inputs, needs_weight, needs_scale, needs_shift, *_ = ctx.needs_input_grad
        pooled, moments = _differentiate_activation(ctx, gradient)
        total = moments[..., 0]
        # Products of the gradient with the normalised values; with the values themselves for a fixed map.
        product = ctx.inverse * (moments[..., 1] - ctx.mean * total)
        constants, factors = _compute_norm_gradient(ctx, layer, total, product)
        products, output_gradient = _differentiate_block(ctx, pooled, constants, factors, needs_inputs=needs_inputs)
        weight_gradient = None
        if needs_weight:
            weight_gradient = torch.zeros(ctx.weight_shape)
            weight_gradient.view(-1)[layer.live.index] = torch.from_numpy(products.astype(np.float32))
        return (
            convolve_back(layer, output_gradient, ctx.weights.values) if needs_inputs else None,
            weight_gradient,
            torch.from_numpy(product.sum(0).astype(np.float32)) if needs_scale else None,
            torch.from_numpy(total.sum(0).astype(np.float32)) if needs_shift else None,
            None,
            None,
        )


def _differentiate_activation(ctx: Any, gradient: Tensor) -> tuple[Floats, Doubles]:
    """Return the gradient ``(samples, outputs, pooled)`` before the activation and its moments by channel."""
    samples, outputs = gradient.shape[:2]
    # A copy, because the loop writes in place and the engine may hand the same gradient to another reader.
    pooled = gradient.clone(memory_format=torch.contiguous_format).view(samples, outputs, -1).numpy()
    moments = np.empty((samples, outputs, 2))

    def differentiate_part(part: Part) -> None:
        slope = np.float32(ctx.layer.spec.slope)
        loops.differentiate_activation(pooled, ctx.kept, ctx.scales, ctx.shifts, slope, moments, part)

    run_parts(ctx.layer.pooled_work, samples, differentiate_part)
    return pooled, moments


def _compute_norm_gradient(ctx: Any, layer: Layer, total: Doubles, product: Doubles) -> tuple[Floats, Floats]:
    """Return constants and factors of :class:`Norm` ``(samples, outputs)``: what mean and variance add to the gradient.

    Ioffe & Szegedy 2015, section 3.

    Args:
        ctx: scale and statistics of the forward pass.
        layer: the layer.
        total: ``(samples, outputs)`` sums of the gradient.
        product: ``(samples, outputs)`` sums of the gradient times the normalised values.
    """
    if layer.spec.norm == "fixed":
        return np.zeros(total.shape, np.float32), np.zeros(total.shape, np.float32)
    count = prod(layer.geometry.output_shape)
    if layer.spec.norm == "batch":
        count *= len(total)
        total, product = (np.broadcast_to(values.sum(0), values.shape) for values in (total, product))
    factors = -ctx.gamma * ctx.inverse**2 * product / count
    constants = -ctx.gamma * ctx.inverse * total / count - factors * ctx.mean
    return constants.astype(np.float32), factors.astype(np.float32)


def _differentiate_block(
    ctx: Any, pooled: Floats, constants: Floats, factors: Floats, *, needs_inputs: bool
) -> tuple[Doubles, Floats]:
    """Return the gradient of the live weights, and that of the convolution's output for :func:`convolve_back`."""
    layer: Layer = ctx.layer
    samples, outputs = pooled.shape[:2]
    width = layer.live.lead + layer.geometry.plane_size
    output_gradient = np.zeros((samples, outputs if needs_inputs else 0, width), np.float32)
    products = np.zeros(layer.live.count)

    norm = Norm(ctx.scales, constants, factors)

    def differentiate_part(part: Part) -> None:
        loops.differentiate_block(
            ctx.source, ctx.weights, layer.geometry.grid, layer.spec.window, pooled, ctx.positions, ctx.values, norm,
            products, output_gradient, layer.live.lead, part,
        )  # fmt: skip

    # One thread adds the samples of a channel in their order: the sum must not depend on the number of threads.
    run_parts(layer.count_work(layer.live.starts), samples, differentiate_part, divides_samples=False)
    return products, output_gradient


def convolve_back(layer: Layer, output_gradient: Floats, values: Floats) -> Tensor:
    """Return the gradient of a block's input ``(samples, inputs, depth, height, width)``.

    Args:
        layer: geometry and live weights.
        output_gradient: ``(samples, outputs, lead + positions)`` gradient of the convolution's output.
        values: ``(live,)`` live weights by output channel.
    """
    geometry, live = layer.geometry, layer.live
    channels, samples = geometry.inputs * geometry.phases, len(output_gradient)
    gradient = torch.zeros(samples, channels, geometry.plane_size)
    array, flat = gradient.numpy(), output_gradient.reshape(samples, -1)
    weights = Weights(live.back_starts, live.back_offsets, values[live.back_order.numpy()])
    count = geometry.plane_size - 2 * live.back_origin

    def convolve_part(part: Part) -> None:
        loops.convolve_back(flat, weights, count, array, live.back_origin, part)

    run_parts(layer.count_work(live.back_starts), samples, convolve_part)
    return geometry.gather(gradient)
