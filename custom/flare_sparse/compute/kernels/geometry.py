"""How a convolution's input lies in memory, and the shift that belongs to each tap of the kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from .arguments import Grid

Triple = tuple[int, int, int]


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
        for axis, (border, size) in enumerate(zip(self.padding, self.shape, strict=True), start=2):
            padded = padded.narrow(axis, border, size)
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
