"""Channel gates: their positions in a network's vector, and proximal operators (docs/algorithms.md, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.mask import Mask
from ...core.params import Layout

_GATE_SUFFIX = ".gate.open.weight"


@dataclass(frozen=True)
class Gates:
    """The gated layers of a layout. A gated layer ``L`` has its gate in ``L.gate`` and its filters in ``L.body``.

    Attributes:
        layers: names of the gated layers.
        phi: all parameters of the gates; everything else is the backbone theta.
        groups: the groups of the Group Lasso, indices ``(channels, hidden + 1)`` for each gated layer: a row of the
            gate's last weight and its bias. A channel whose group is zero is closed for every input.
        filters: what computes a channel (filter, bias, affine of the norm), indices ``(channels, n)`` for each gated
            layer.
    """

    layers: tuple[str, ...]
    phi: Mask
    groups: tuple[Tensor, ...]
    filters: tuple[Tensor, ...]

    @classmethod
    def from_layout(cls, layout: Layout) -> Gates:
        """Return the gates of a layout; MetaGater without gating where there is none."""
        layers = [t.name.removesuffix(_GATE_SUFFIX) for t in layout.tensors if t.name.endswith(_GATE_SUFFIX)]
        prefixes = tuple(f"{layer}.gate." for layer in layers)
        phi = Mask.from_tensors(layout, lambda tensor: bool(prefixes) and tensor.name.startswith(prefixes))
        groups = tuple(_list_channels(layout, f"{layer}.gate.open.") for layer in layers)
        filters = tuple(_list_channels(layout, f"{layer}.body.", buffers=False) for layer in layers)
        return cls(tuple(layers), phi, groups, filters)

    def find_closed_channels(self, live: Mask) -> dict[str, Tensor]:
        """Return bool ``(channels,)`` for each gated layer: the channels without any live entry."""
        layers = zip(self.layers, self.groups, self.filters, strict=True)
        return {layer: ~torch.cat([live.bits[g], live.bits[f]], dim=1).any(1) for layer, g, f in layers}

    def select_closed(self, vector: Tensor) -> Mask:
        """Return the groups that are zero in ``vector`` ``(P,)``, and their filters; these entries have no effect."""
        bits = torch.zeros(vector.numel(), dtype=torch.bool)
        for groups, filters in zip(self.groups, self.filters, strict=True):
            is_zero = ~vector[groups].any(1)
            bits[groups[is_zero]] = True
            bits[filters[is_zero]] = True
        return Mask(bits)


def _list_channels(layout: Layout, prefix: str, *, buffers: bool = True) -> Tensor:
    """Return indices ``(channels, n)`` of the tensors with a prefix, whose first axis is the channel."""
    parts = [
        torch.arange(start, start + tensor.size).reshape(tensor.shape[0], -1)
        for tensor, start in zip(layout.tensors, layout.offsets, strict=False)
        if tensor.name.startswith(prefix) and (buffers or tensor.role != "buffer")
    ]
    return torch.cat(parts, dim=1)


def compute_group_lasso_prox(v: Tensor, groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Return the prox of ``threshold * sum_g sqrt(|g|) ||v_g||``: each group shrinks towards zero or becomes zero.

    ``v_g <- max(0, 1 - threshold * sqrt(|g|) / ||v_g||) v_g`` (Yuan and Lin 2006), with exact zeros where the norm is
    at most the threshold.

    Args:
        v: ``(P,)``, which is not changed.
        groups: index tensors ``(groups, entries)``, disjoint; all other entries are not penalised.
        threshold: step times the weight of the penalty, at least 0.
    """
    if not threshold or not groups:
        return v
    result = v.clone()
    for indices in groups:
        members = v[indices]
        norms = torch.linalg.vector_norm(members, dim=1, keepdim=True)
        limit = threshold * indices.shape[1] ** 0.5
        # A comparison, not a clamp, so that a group at the limit is exactly zero; clamp_min avoids 0 / 0 in the
        # branch that ``where`` discards.
        factors = torch.where(
            norms > limit, 1 - limit / norms.clamp_min(torch.finfo(v.dtype).tiny), torch.zeros_like(norms)
        )
        result[indices] = members * factors
    return result


def compute_l1_prox(v: Tensor, groups: Sequence[Tensor], threshold: float) -> Tensor:
    """Return the prox of ``threshold * sum |v_i|`` over the entries of the groups: soft thresholding.

    ``v_i <- sign(v_i) max(0, |v_i| - threshold)``, with exact zeros at or below the threshold.

    Args:
        v: ``(P,)``, which is not changed.
        groups: index tensors of the penalised entries, disjoint.
        threshold: step times the weight of the penalty, at least 0.
    """
    result = v.clone()
    for indices in groups:
        result[indices] = torch.nn.functional.softshrink(v[indices], threshold)
    return result
