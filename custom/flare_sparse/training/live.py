"""The trainable entries of a network, found once per mask: a step of training touches no others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.mask import Mask
from ..core.params import Layout


@dataclass(frozen=True)
class LiveTensor:
    """Trainable entries of one parameter.

    Attributes:
        entries: their range among the trainable parameters of the network.
        index: int32 ``(n,)`` their positions within the parameter; None: all entries of the parameter train.
    """

    entries: slice
    index: Tensor | None

    @property
    def count(self) -> int:
        """Number of trainable entries."""
        return int(self.entries.stop - self.entries.start)


@dataclass(frozen=True)
class LiveEntries:
    """The entries of a mask, by parameter.

    Attributes:
        mask: the mask, buffers included.
        parameters: trainable entries of each parameter, in the order of the layout.
        index: int64 ``(n,)`` positions of the trainable parameters in the vector; None: all parameters train.
        buffers: int64 ``(b,)`` positions of the trainable buffers, counted from the first buffer.
    """

    mask: Mask
    parameters: tuple[LiveTensor, ...]
    index: Tensor | None
    buffers: Tensor

    @classmethod
    def from_mask(cls, mask: Mask, layout: Layout, device: torch.device) -> LiveEntries:
        """Return the entries of a mask on a device."""
        size = layout.num_parameters
        specs = [
            (spec, start) for spec, start in zip(layout.tensors, layout.offsets, strict=False) if spec.role != "buffer"
        ]
        # The indices of a full mask would take twice the memory of the vector.
        if mask.is_full:
            ranges = [LiveTensor(slice(start, start + spec.size), None) for spec, start in specs]
            return cls(mask, tuple(ranges), None, torch.arange(layout.size - size, device=device))
        ends = torch.searchsorted(mask.indices, torch.tensor([start + spec.size for spec, start in specs])).tolist()
        tensors, first = [], 0
        for (spec, start), end in zip(specs, ends, strict=True):
            local = None if end - first == spec.size else (mask.indices[first:end] - start).to(device, torch.int32)
            tensors.append(LiveTensor(slice(first, end), local))
            first = end
        index = None if first == size else mask.indices[:first].to(device)
        return cls(mask, tuple(tensors), index, mask.indices[first:].to(device) - size)

    @property
    def count(self) -> int:
        """Number of trainable parameters."""
        return self.parameters[-1].entries.stop if self.parameters else 0

    def collect_gradient(self, number: int, parameter: Tensor, out: Tensor, *, is_first: bool) -> None:
        """Write the gradient of the trainable entries of one parameter to ``out``, or add it; drop the gradient.

        Args:
            number: number of the parameter in the layout.
            parameter: has a gradient.
            out: ``(count,)``, on its device.
            is_first: whether ``out`` has no gradient of this parameter yet.
        """
        live = self.parameters[number]
        assert parameter.grad is not None
        # Only the gradient of an embedding with sparse=True is not dense already.
        gradient, target = parameter.grad.to_dense().reshape(-1), out[live.entries]
        parameter.grad = None
        if not live.count:
            return
        if not is_first:
            target.add_(gradient if live.index is None else gradient.index_select(0, live.index))
        # Adding 0.0 turns -0.0 into 0.0, as autograd does where it adds to a gradient of zeros.
        elif live.index is None:
            torch.add(gradient, 0.0, out=target)
        else:
            torch.index_select(gradient, 0, live.index, out=target)
            target.add_(0.0)
