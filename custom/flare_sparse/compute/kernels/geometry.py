"""How a convolution's input lies in memory, which shift belongs to each tap of the kernel, and where live weights read.

These are the arguments of the compiled loops, too. This module needs no numba, which is an optional dependency.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Triple = tuple[int, int, int]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]


class Grid(NamedTuple):
    """Output positions of a convolution on the padded, flattened input.

    Attributes:
        depth: output planes.
        height: output rows of a plane.
        width: output positions of a row.
        plane: flat distance of two planes of the padded input.
        row: flat distance of two rows of the padded input.
    """

    depth: int
    height: int
    width: int
    plane: int
    row: int


class Window(NamedTuple):
    """Size of a pooling window, or of a pooled volume; the window (1, 1, 1) does not pool."""

    depth: int
    height: int
    width: int


class Weights(NamedTuple):
    """Live weights of a layer, ordered by the channel that they add to.

    Attributes:
        starts: int64 ``(channels + 1,)`` first live weight of each channel.
        offsets: int64 ``(live,)`` flat index, in the values read, of position 0 of the channel written.
        values: float32 ``(live,)``.
    """

    starts: Any
    offsets: Any
    values: Any


class Part(NamedTuple):
    """Samples and channels that one call computes: ``first <= sample < last`` and ``first <= channel < last``."""

    first_sample: int
    last_sample: int
    first_channel: int
    last_channel: int


class Norm(NamedTuple):
    """Per sample and channel, the affine map that the normalisation amounts to, and its derivative.

    The gradient of the convolution's output ``y`` is ``scales * g + constants + factors * y``, where ``g`` is the
    gradient of the pooled values at their positions, and 0 elsewhere.
    """

    scales: Any
    constants: Any
    factors: Any


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution of volumes.

    With a stride s, the input is divided into s phases per axis: phase p holds the positions p, p + s, p + 2 s, ... The
    taps that read a phase are shifts of it, so every convolution becomes one of stride 1 over more channels.

    Attributes:
        inputs: input channels.
        outputs: output channels.
        shape: spatial size of the input.
        kernel: size of the kernel.
        stride: stride per axis.
        padding: zeros on either side of each axis.
        dilation: distance of neighbouring taps.
    """

    inputs: int
    outputs: int
    shape: Triple
    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple

    @classmethod
    def from_layer(cls, layer: nn.Conv3d, shape: tuple[int, ...]) -> Geometry:
        """Return the geometry of a layer.

        Args:
            layer: convolution with ``groups`` 1 and zero padding.
            shape: spatial size of its input.
        """
        assert not isinstance(layer.padding, str)
        sizes = (shape, layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        return cls(layer.in_channels, layer.out_channels, *map(build_triple, sizes))

    @cached_property
    def output_shape(self) -> Triple:
        """Spatial size of the output."""
        return build_triple(
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, p, d, k, s in zip(self.shape, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        )

    @cached_property
    def phase_shape(self) -> Triple:
        """Spatial size of one phase of the padded input."""
        return build_triple(
            -(-(size + 2 * p) // s) for size, p, s in zip(self.shape, self.padding, self.stride, strict=True)
        )

    @property
    def phases(self) -> int:
        """Number of phases of each input channel."""
        return prod(self.stride)

    @cached_property
    def grid(self) -> Grid:
        """Output positions on a phase."""
        _, height, width = self.phase_shape
        return Grid(*self.output_shape, height * width, width)

    @property
    def plane_size(self) -> int:
        """Positions of one phase."""
        return prod(self.phase_shape)

    @cached_property
    def extent(self) -> int:
        """Number of contiguous positions that hold all outputs of a channel."""
        depth, height, width, plane, row = self.grid
        return (depth - 1) * plane + (height - 1) * row + width

    @cached_property
    def taps(self) -> tuple[Tensor, Tensor]:
        """``(phases, shifts)``, each ``(prod(kernel),)``: the phase that a tap reads and its flat shift."""
        axes = [torch.arange(k) * d for k, d in zip(self.kernel, self.dilation, strict=True)]
        grids = torch.meshgrid(*axes, indexing="ij")
        phase, shift = torch.zeros(self.kernel, dtype=torch.long), torch.zeros(self.kernel, dtype=torch.long)
        for positions, stride, distance in zip(grids, self.stride, (self.grid.plane, self.grid.row, 1), strict=True):
            phase = phase * stride + positions % stride
            shift += positions // stride * distance
        return phase.flatten(), shift.flatten()

    def lay_out(self, inputs: Tensor) -> Tensor:
        """Return the padded input as a contiguous ``(samples, inputs * phases, positions)``.

        Args:
            inputs: ``(samples, inputs, depth, height, width)``.
        """
        depth, height, width = self.padding
        padded = functional.pad(inputs.contiguous(), (width, width, height, height, depth, depth))
        if self.phases == 1:
            return padded.flatten(2)
        phases = torch.zeros(len(inputs), self.inputs, self.phases, *self.phase_shape)
        for phase, source in zip(phases.unbind(2), self._slice_phases(padded), strict=True):
            depth, height, width = source.shape[2:]
            phase[:, :, :depth, :height, :width] = source
        return phases.view(len(inputs), self.inputs * self.phases, -1)

    def gather(self, phases: Tensor) -> Tensor:
        """Return the feature map of phases ``(samples, inputs * phases, positions)``; inverts :meth:`lay_out`."""
        buffer = phases.view(len(phases), self.inputs, self.phases, *self.phase_shape)
        padded = buffer.squeeze(2)
        if self.phases > 1:
            sizes = (size + 2 * border for size, border in zip(self.shape, self.padding, strict=True))
            padded = torch.zeros(len(phases), self.inputs, *sizes)
            for phase, target in zip(buffer.unbind(2), self._slice_phases(padded), strict=True):
                depth, height, width = target.shape[2:]
                target.copy_(phase[:, :, :depth, :height, :width])
        planes, rows, columns = (slice(p, p + size) for p, size in zip(self.padding, self.shape, strict=True))
        return padded[:, :, planes, rows, columns]

    def _slice_phases(self, volume: Tensor) -> list[Tensor]:
        """Return the strided slices of a padded volume, one for each phase."""
        depth, height, width = self.stride
        starts = product(range(depth), range(height), range(width))
        return [volume[:, :, z::depth, y::height, x::width] for z, y, x in starts]


def build_triple(values: int | Iterable[int]) -> Triple:
    """Return three values, or one value three times, as a tuple."""
    first, second, third = (values,) * 3 if isinstance(values, int) else values
    return first, second, third


@dataclass(frozen=True)
class LiveWeights:
    """Live weights by output channel, for the forward pass, and by input channel, for the gradient of the input.

    Attributes:
        index: ``(live,)`` flat index of each live weight in the layer's weight tensor.
        starts: ``(outputs + 1,)`` first live weight of each output channel.
        offsets: ``(live,)`` flat offset in the laid-out input.
        back_order: ``(live,)`` the live weights sorted by input channel and phase.
        back_starts: ``(inputs * phases + 1,)`` first of them for each input channel and phase.
        back_offsets: ``(live,)`` flat offset in the gradient of the output, for input position ``back_origin``.
        back_origin: first input position that the padding does not cover.
        lead: zeros that precede each channel's gradient.
    """

    index: Tensor
    starts: Integers
    offsets: Integers
    back_order: Tensor
    back_starts: Integers
    back_offsets: Integers
    back_origin: int
    lead: int

    @classmethod
    def from_mask(cls, live: Tensor, geometry: Geometry) -> LiveWeights:
        """Return the live weights of a layer.

        Args:
            live: bool, shape of the layer's weight ``(outputs, inputs, *kernel)``.
            geometry: sizes of the layer.
        """
        index = live.flatten().nonzero().squeeze(1)
        phases, shifts = geometry.taps
        taps = len(shifts)
        output, rest = index // (geometry.inputs * taps), index % (geometry.inputs * taps)
        source = rest // taps * geometry.phases + phases[rest % taps]
        shift = shifts[rest % taps]
        order = torch.argsort(source, stable=True)
        lead = int(shifts.max())
        # Without stride, nothing reads the gradient of padding, and the positions before the first voxel are skipped.
        origin = 0
        if geometry.phases == 1:
            depth, height, width = geometry.padding
            origin = depth * geometry.grid.plane + height * geometry.grid.row + width
        return cls(
            index=index,
            starts=_count_starts(output, geometry.outputs),
            offsets=(source * geometry.plane_size + shift).numpy(),
            back_order=order,
            back_starts=_count_starts(source[order], geometry.inputs * geometry.phases),
            back_offsets=(output * (lead + geometry.plane_size) + lead - shift + origin)[order].numpy(),
            back_origin=origin,
            lead=lead,
        )

    @property
    def count(self) -> int:
        """Number of live weights."""
        return len(self.index)


def _count_starts(rows: Tensor, count: int) -> Integers:
    """Return the index of the first element of each row, and the number of elements, of ascending ``rows``."""
    return torch.searchsorted(rows.contiguous(), torch.arange(count + 1)).numpy()
