"""Entries that are revealed together, and the two ways to choose among them: a share of channels, or a budget.

The groups of a network (SCBF, section 3.2; ALGORITHMS 2.4 #5, 2.7): the row of weights of a unit that reads the input;
the kernel, or the weights of a flattened channel, between two units; a unit's bias with the scale and shift of its
normalisation; its running statistics. What belongs to no unit always travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ...errors import SelectionError
from ...mask import Mask, floor_fraction, top_k
from ...params import Layout

Selection = Literal["positive", "negative"]
Biases = Literal["selected", "never", "all"]
Kind = Literal["weight", "bias", "statistic", "always"]
INFINITY = float("inf")


@dataclass(frozen=True)
class Section:
    """Groups of one kind that lie next to each other.

    Attributes:
        kind: of all of them.
        count: how many groups; each entry is cut into as many equal parts along its leading axes.
        entries: names.
    """

    kind: Kind
    count: int
    entries: tuple[str, ...]


class Groups(ABC):
    """A network's groups, and what is revealed of a change.

    Args:
        layout: of the network.
        sections: of groups; what they leave out always travels.
        biases: whether the groups of kind ``bias`` travel with the selected units, never, or always.
    """

    exact: bool
    """Whether exactly ``ceil(rate * channels)`` are chosen; else the threshold is an estimate."""
    found: str
    """What was found in the network, for people."""
    threshold: str
    """How the threshold of a rate is come by, for people."""

    def __init__(self, layout: Layout, sections: Sequence[Section], biases: Biases):
        self.layout, self._biases = layout, biases
        named = {name for section in sections for name in section.entries}
        rest = tuple(entry.name for entry in layout.tensors if entry.name not in named)
        sections = [*sections, *(Section("always", 1, (name,)) for name in rest)]
        self._group_of = torch.empty(layout.size, dtype=torch.int64)
        tensors, first = layout.unflatten(self._group_of), 0
        for section in sections:
            for name in section.entries:
                tensors[name].view(section.count, -1)[:] = torch.arange(first, first + section.count)[:, None]
            first += section.count
        self.count = first
        self._always = len(rest)
        self._kinds = np.repeat([section.kind for section in sections], [section.count for section in sections])
        parameters = self._group_of[: layout.trainable_size]
        self._parameters = torch.bincount(parameters, minlength=self.count)

    @abstractmethod
    def select(self, change: Tensor, rate: float, selection: Selection, draw: torch.Generator) -> list[Tensor]:
        """Bool tensors, one value for each group of the sections in order: what the top ``rate`` reveals."""

    @abstractmethod
    def scores(self, change: Tensor) -> list[Tensor]:
        """float64, likewise: the norm of the best channel through each group."""

    def select_by_rate(self, change: Tensor, rate: float, selection: Selection, draw: torch.Generator) -> Mask:
        """The entries revealed by the ``ceil(rate * channels)`` most active channels.

        Args:
            change: ``(P,)`` by local training.
            rate: alpha, 0 to 1; 0 reveals nothing, 1 everything (but for ``biases="never"``).
            selection: positive: at least one selected channel passes through; negative: no other channel does.
            draw: for networks that have too many channels to list.

        Raises:
            SelectionError: a change is not finite.
        """
        _require_finite(change)
        if rate in (0.0, 1.0):
            on = torch.full((self.count,), bool(rate))
        else:
            on = self._joined(self.select(change, rate, selection, draw), True)
        return self._mask(on) if rate else Mask.empty(self.layout.size)

    def select_by_budget(self, change: Tensor, fraction: float) -> Mask:
        """Exactly ``floor(fraction * parameters)`` parameters, those on the best channels first.

        Groups are taken whole in the order of the best channel through them; of the group that the budget ends in,
        the largest changes. Running statistics are no parameters; they come with the units whose bias would. What
        always travels does so even when it is more than the budget.

        Args:
            change: ``(P,)`` by local training.
            fraction: 0 to 1, of all trainable parameters.

        Raises:
            SelectionError: a change is not finite, or ``biases="never"`` leaves fewer parameters than wanted.
        """
        _require_finite(change)
        scores = self._joined(self.scores(change), INFINITY)
        if self._biases == "all":
            scores[torch.from_numpy(self._kinds == "bias")] = INFINITY
        costs = torch.where(self._allowed(), self._parameters, 0)
        wanted = floor_fraction(fraction, self.layout.trainable_size)
        if int(costs.sum()) < wanted:
            raise SelectionError(
                f"a budget of {wanted} parameters, but only {int(costs.sum())} may be revealed: lower it"
            )
        order = torch.from_numpy(np.argsort(-scores.numpy(), kind="stable"))
        spent = costs[order].cumsum(0)
        last = int(torch.searchsorted(spent, wanted, right=True)) if wanted else 0
        on = scores == INFINITY
        on[order[:last]] = True
        mask, left = self._mask(on), wanted - int(costs[on].sum())
        if left > 0:
            mask = mask | top_k(change.abs(), left, within=Mask(self._group_of == order[last]))
        return mask

    def _joined(self, parts: Sequence[Tensor], always: bool | float) -> Tensor:
        flat = [part.flatten() for part in parts]
        return torch.cat([*flat, torch.full((self._always,), always, dtype=flat[0].dtype)])

    def _allowed(self) -> Tensor:
        never = "bias" if self._biases == "never" else ""
        return torch.from_numpy(self._kinds != never)

    def _mask(self, on: Tensor) -> Mask:
        """The entries of the groups ``on``, with the rule for biases in force."""
        if self._biases == "all":
            on = on | torch.from_numpy(self._kinds == "bias")
        return Mask((on & self._allowed())[self._group_of])


def _require_finite(change: Tensor) -> None:
    if not bool(torch.isfinite(change).all()):
        bad = int((~torch.isfinite(change)).sum())
        raise SelectionError(f"{bad} of {change.numel()} changes are not finite; nothing is selected")
