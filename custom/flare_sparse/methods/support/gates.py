"""Where the channel gates of a network lie in its vector: phi, the groups of the Group Lasso, the filters behind each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...mask import Mask
from ...params import Layout


@dataclass(frozen=True)
class Gates:
    """The gated layers of a layout. A gated layer ``L`` has its gate in ``L.gate`` and its filters in ``L.body``.

    Attributes:
        layers: names of the gated layers.
        phi: all parameters of the gates; everything else is the backbone theta.
        groups: per gated layer, indices ``(channels, hidden + 1)``: a row of the gate's last weight and its bias. A
            channel whose group is zero is closed for every input.
        filters: per gated layer, indices ``(channels, n)`` of what makes this channel: filter, bias, norm affine.
    """

    layers: tuple[str, ...]
    phi: Mask
    groups: tuple[Tensor, ...]
    filters: tuple[Tensor, ...]

    @classmethod
    def from_layout(cls, layout: Layout) -> Gates:
        """The gates of a layout; none at all is MetaGater without gating."""
        layers = [e.name.removesuffix(".gate.open.weight") for e in layout.tensors if _opens(e.name)]
        inside = tuple(f"{layer}.gate." for layer in layers)
        phi = Mask.from_tensors(layout, lambda entry: bool(inside) and entry.name.startswith(inside))
        groups = tuple(_rows(layout, f"{layer}.gate.open.") for layer in layers)
        filters = tuple(_rows(layout, f"{layer}.body.", buffers=False) for layer in layers)
        return cls(tuple(layers), phi, groups, filters)

    def channels_off(self, live: Mask) -> dict[str, Tensor]:
        """By gated layer, bool ``(channels,)``: those that a mask has nothing of, neither group nor filter."""
        entries = zip(self.layers, self.groups, self.filters, strict=True)
        return {layer: ~torch.cat([live.bits[g], live.bits[f]], dim=1).any(1) for layer, g, f in entries}

    def closed(self, vector: Tensor) -> Mask:
        """Groups that are zero, and the filters behind them: nothing of these has an effect."""
        on = torch.zeros(vector.numel(), dtype=torch.bool)
        for groups, filters in zip(self.groups, self.filters, strict=True):
            zero = ~vector[groups].any(1)
            on[groups[zero]] = True
            on[filters[zero]] = True
        return Mask(on)


def _opens(name: str) -> bool:
    return name.endswith(".gate.open.weight")


def _rows(layout: Layout, prefix: str, *, buffers: bool = True) -> Tensor:
    """Indices ``(channels, n)`` of the tensors below a prefix, their first axis being the channel."""
    parts = [
        torch.arange(start, start + entry.size).reshape(entry.shape[0], -1)
        for entry, start in zip(layout.tensors, layout.offsets, strict=False)
        if entry.name.startswith(prefix) and (buffers or entry.role != "buffer")
    ]
    return torch.cat(parts, dim=1)
