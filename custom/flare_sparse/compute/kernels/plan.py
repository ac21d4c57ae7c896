"""The live weights of a layer, in the order in which the loops read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import Integers
from .geometry import Geometry


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
