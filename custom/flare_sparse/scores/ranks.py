"""Ranks of LoRA adapters as things to choose: slots, their scores, their masks (LoRA-A2, section 3; ALGORITHMS 3.1).

An adapter of a module adds ``s * B A`` to its frozen weight; of a convolution too, whose kernel is viewed as a matrix
(``A``: ``r`` filters, ``B``: 1x1x1). Slot ``(m, i)`` is rank ``i`` of module ``m``: column ``i`` of ``B`` and row ``i``
of ``A``. Slots are numbered module by module, in the order of the layout.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..mask import Mask, top_k
from ..params import Layout, TensorSpec

Factor = Literal["A", "B"]

_NAME = re.compile(r"(.+)\.lora_([AB])\.([^.]+)\.weight")  # as peft names them


@dataclass(frozen=True)
class Adapter:
    """The two factors of one module: entries, and where each starts in a vector."""

    module: str
    a: TensorSpec
    b: TensorSpec
    a_start: int
    b_start: int

    @property
    def rank(self) -> int:
        """r_G."""
        return self.a.shape[0]

    def width(self, factor: Factor) -> int:
        """Scalars of one slot: d1 in ``B``, d2 in ``A``."""
        return (self.a if factor == "A" else self.b).size // self.rank

    def matrix(self, vector: Tensor, factor: Factor) -> Tensor:
        """A view of ``vector`` ``(P,)``: ``B`` as ``(d1, r)``, ``A`` as ``(r, d2)``."""
        if factor == "A":
            return vector[self.a_start : self.a_start + self.a.size].view(self.rank, -1)
        return vector[self.b_start : self.b_start + self.b.size].view(-1, self.rank)

    def slots(self, vector: Tensor, factor: Factor) -> Tensor:
        """The same with one slot a row: ``(r, d1)`` or ``(r, d2)``."""
        matrix = self.matrix(vector, factor)
        return matrix if factor == "A" else matrix.T


class Slots:
    """All slots of a layout.

    Attributes:
        layout: of the adapted network.
        adapters: one a module, in the order of the layout.

    Raises:
        ConfigError: there is no adapter, or one lacks a factor or has another rank than the others.
    """

    def __init__(self, layout: Layout):
        self.layout, self.adapters = layout, _adapters(layout)

    @property
    def modules(self) -> int:
        """N."""
        return len(self.adapters)

    @property
    def rank(self) -> int:
        """r_G, the rank of every adapter."""
        return self.adapters[0].rank

    @cached_property
    def factors(self) -> dict[Factor, Mask]:
        """All entries of one factor."""
        every = torch.ones(self.modules * self.rank, dtype=torch.bool)
        return {"A": self.mask(every, "A"), "B": self.mask(every, "B")}

    @cached_property
    def rest(self) -> Mask:
        """What is neither factor, such as a head that trains."""
        return ~(self.factors["A"] | self.factors["B"])

    def widths(self, factor: Factor) -> Tensor:
        """int64 ``(N * r,)``: scalars of each slot."""
        return torch.tensor([adapter.width(factor) for adapter in self.adapters]).repeat_interleave(self.rank)

    def mask(self, chosen: Tensor, factor: Factor) -> Mask:
        """The entries of one factor that belong to chosen slots; ``chosen`` is bool ``(N * r,)``."""
        on = torch.zeros(self.layout.size, dtype=torch.bool)
        for adapter, ranks in zip(self.adapters, chosen.split(self.rank), strict=True):
            adapter.slots(on, factor)[ranks] = True
        return Mask(on)

    def select_first(self, rank: int) -> Mask:
        """Both factors of the first ``rank`` slots of every module."""
        chosen = (torch.arange(self.rank) < rank).repeat(self.modules)
        return self.mask(chosen, "A") | self.mask(chosen, "B")

    def find_slots(self, mask: Mask, factor: Factor) -> Tensor | None:
        """The slots that make up ``mask``, bool ``(N * r,)``; None when it is not made of whole slots of ``factor``
        alone (the rest of the layout is not looked at).
        """
        found = torch.cat([adapter.slots(mask.bits, factor).any(1) for adapter in self.adapters])
        return found if self.mask(found, factor) == mask - self.rest else None

    def compute_norms(self, vector: Tensor, factor: Factor) -> Tensor:
        """``(N * r,)``: L2 norm of every slot."""
        return torch.cat([torch.linalg.vector_norm(a.slots(vector, factor), dim=1) for a in self.adapters])

    def compute_sums(self, vector: Tensor, factor: Factor) -> Tensor:
        """``(N * r,)``: sum of every slot's entries."""
        return torch.cat([a.slots(vector, factor).sum(1) for a in self.adapters])


def compute_contribution(slots: Slots, change: Tensor, held: Tensor, active: Factor) -> Tensor:
    """``(N * r,)``: how much of the update a slot carries, ``||dB[:, i] A[i, :]||_F`` in a B round (Eq. 4).

    The Frobenius norm of a rank-1 matrix is the product of its vectors' norms, so no product is formed.

    Args:
        slots: of the layout.
        change: ``(P,)`` what the trial changed in the active factor.
        held: ``(P,)`` weights, of which the other factor is read.
        active: the factor that trains in this round.
    """
    return slots.compute_norms(change, active) * slots.compute_norms(held, "A" if active == "B" else "B")


def choose_slots(slots: Slots, scores: Tensor, budget: int, active: Factor, *, per_scalar: bool = False) -> Mask:
    """The slots that a site may train and send, as entries of the active factor.

    Args:
        slots: of the layout.
        scores: ``(N * r,)``.
        budget: r_k; more than r_G counts as r_G.
        active: the factor.
        per_scalar: False: the ``r_k * N`` best over the whole model, ties to the lowest number (the paper). True: at
            most as many scalars as ``r_k`` ranks of every module have; the best by score per scalar that still fit.

    Raises:
        SelectionError: a score is NaN.
    """
    budget = min(budget, slots.rank)
    if not per_scalar:
        return slots.mask(top_k(scores, budget * slots.modules).bits, active)
    widths = slots.widths(active)
    left = budget * int(widths.sum()) // slots.rank
    top_k(scores, 0)  # refuses NaN
    chosen = torch.zeros(scores.numel(), dtype=torch.bool)
    for slot in torch.sort(scores / widths, descending=True, stable=True).indices.tolist():
        if widths[slot] <= left:
            chosen[slot] = True
            left -= int(widths[slot])
    return slots.mask(chosen, active)


def _adapters(layout: Layout) -> tuple[Adapter, ...]:
    found: dict[str, dict[str, tuple[TensorSpec, int]]] = {}
    for entry, start in zip(layout.tensors, layout.offsets, strict=False):
        if named := _NAME.fullmatch(entry.name):
            found.setdefault(named[1], {})[named[2]] = (entry, start)
    if not found:
        raise ConfigError(
            "the network has no LoRA adapters, which this method exchanges; give the task an adapter, such as "
            "task.adapter: {rank: 16}"
        )
    adapters = []
    for module, factors in found.items():
        if factors.keys() != {"A", "B"}:
            raise ConfigError(f"adapter of {module!r}: only factor {sorted(factors)} trains; both must")
        (a, a_start), (b, b_start) = factors["A"], factors["B"]
        adapters.append(Adapter(module, a, b, a_start, b_start))
    ranks = {(adapter.a.shape[0], adapter.b.shape[1]) for adapter in adapters}
    if len(ranks) > 1 or any(r != q for r, q in ranks):
        raise ConfigError(f"adapters of ranks {sorted(ranks)} (A, B); all must have the same")
    return tuple(adapters)
