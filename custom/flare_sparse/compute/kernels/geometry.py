"""How a convolution's input lies in memory, and the shift that belongs to each tap of the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .arguments import Grid

Triple = tuple[int, int, int]


class PaddedVolume(NamedTuple):
    """A feature map inside a larger buffer whose border is zero.

    Attributes:
        buffer: ``(samples, channels, depth, height, width)`` with the border.
        border: width of the border on either side of each axis.
    """

    buffer: Tensor
    border: Triple

    @property
    def interior(self) -> Tensor:
        """The feature map; it shares the buffer's memory."""
        view = self.buffer
        for axis, border in enumerate(self.border, start=2):
            view = view.narrow(axis, border, view.shape[axis] - 2 * border)
        # A tensor of its own on the same memory: torch refuses to change a view in place that an autograd function
        # returned, and a layer such as ReLU(inplace=True) may follow.
        storage = self.buffer.untyped_storage()
        return torch.empty(0).set_(storage, view.storage_offset(), view.shape, view.stride())


def allocate_padded(samples: int, channels: int, shape: Triple, border: Triple) -> PaddedVolume:
    """Return a feature map of zeros with a border."""
    depth, height, width = (size + 2 * b for size, b in zip(shape, border, strict=True))
    return PaddedVolume(torch.zeros(samples, channels, depth, height, width), border)


@dataclass(frozen=True)
class Geometry:
    """Sizes of a convolution with one to three spatial axes; missing leading axes have size 1.

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
    def from_layer(cls, layer: nn.modules.conv._ConvNd, shape: tuple[int, ...]) -> Geometry:
        """Return the geometry of a layer.

        Args:
            layer: convolution with ``groups`` 1 and zero padding.
            shape: spatial size of its input, with as many axes as the layer.
        """
        assert not isinstance(layer.padding, str)
        axes = 3 - len(shape)
        zeros, ones = (0,) * axes, (1,) * axes
        return cls(
            layer.in_channels,
            layer.out_channels,
            build_triple((*ones, *shape)),
            build_triple((*ones, *layer.kernel_size)),
            build_triple((*ones, *layer.stride)),
            build_triple((*zeros, *layer.padding)),
            build_triple((*ones, *layer.dilation)),
        )

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

    def lay_out(self, inputs: Tensor | PaddedVolume) -> Tensor:
        """Return the input as a contiguous ``(samples, inputs * phases, positions)``.

        A padded feature map whose border is this layer's padding is returned without a copy.

        Args:
            inputs: ``(samples, inputs, depth, height, width)``.
        """
        if isinstance(inputs, PaddedVolume):
            if inputs.border == self.padding and self.phases == 1:
                return inputs.buffer.flatten(2)
            inputs = inputs.interior
        padded = allocate_padded(len(inputs), self.inputs, self.shape, self.padding)
        padded.interior.copy_(inputs)
        if self.phases == 1:
            return padded.buffer.flatten(2)
        phases = torch.zeros(len(inputs), self.inputs, self.phases, *self.phase_shape)
        for phase, source in zip(phases.unbind(2), self._slice_phases(padded.buffer), strict=True):
            depth, height, width = source.shape[2:]
            phase[:, :, :depth, :height, :width] = source
        return phases.view(len(inputs), self.inputs * self.phases, -1)

    def gather(self, phases: Tensor) -> PaddedVolume:
        """Return the padded feature map of phases ``(samples, inputs * phases, positions)``; inverts :meth:`lay_out`.

        Values on the border are not specified.
        """
        buffer = phases.view(len(phases), self.inputs, self.phases, *self.phase_shape)
        if self.phases == 1:
            return PaddedVolume(buffer.squeeze(2), self.padding)
        padded = allocate_padded(len(phases), self.inputs, self.shape, self.padding)
        for phase, target in zip(buffer.unbind(2), self._slice_phases(padded.buffer), strict=True):
            depth, height, width = target.shape[2:]
            target.copy_(phase[:, :, :depth, :height, :width])
        return padded

    def _slice_phases(self, volume: Tensor) -> list[Tensor]:
        """Return the strided slices of a padded volume, one for each phase."""
        depth, height, width = self.stride
        starts = product(range(depth), range(height), range(width))
        return [volume[:, :, z::depth, y::height, x::width] for z, y, x in starts]


def build_triple(values: Iterable[int]) -> Triple:
    """Return three values as a tuple."""
    first, second, third = values
    return first, second, third
