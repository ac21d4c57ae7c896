"""Slots of LoRA adapters: their scores, their masks, and the selection of some of them (LoRA-A2, section 3).

The adapter of a module adds ``s * B A`` to its frozen weight. The kernel of a convolution is viewed as a matrix: ``A``
holds ``r`` filters and ``B`` is a 1x1x1 convolution. Slot ``(m, i)`` is rank ``i`` of module ``m``: column ``i`` of
``B`` and row ``i`` of ``A``. Slots are numbered module by module, in the order of the layout (docs/algorithms.md,
section 4.1).
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from ...core.errors import ConfigError
from ...core.mask import Mask, top_k
from ...core.params import Layout, TensorSpec

Factor = Literal["A", "B"]

FACTOR_NAME = re.compile(r"(.+)\.lora_([AB])\.([^.]+)\.weight")
"""Name of a factor as peft gives it: module, factor, adapter."""


@dataclass(frozen=True)
class Adapter:
    """The two factors of one module and the position of each in a vector."""

    module: str
    a: TensorSpec
    b: TensorSpec
    a_start: int
    b_start: int

    @property
    def rank(self) -> int:
        """r_G, the number of slots."""
        return self.a.shape[0]

    def get_slot_width(self, factor: Factor) -> int:
        """Return the number of scalars of one slot: d1 in ``B``, d2 in ``A``."""
        return (self.a if factor == "A" else self.b).size // self.rank

    def view_matrix(self, vector: Tensor, factor: Factor) -> Tensor:
        """Return one factor as a view of ``vector`` ``(P,)``: ``B`` as ``(d1, r)``, ``A`` as ``(r, d2)``."""
        if factor == "A":
            return vector[self.a_start : self.a_start + self.a.size].view(self.rank, -1)
        return vector[self.b_start : self.b_start + self.b.size].view(-1, self.rank)

    def view_slots(self, vector: Tensor, factor: Factor) -> Tensor:
        """Return one factor as a view with one slot per row: ``(r, d1)`` or ``(r, d2)``."""
        matrix = self.view_matrix(vector, factor)
        return matrix if factor == "A" else matrix.T


class Slots:
    """All slots of a layout.

    Attributes:
        layout: layout of the network with adapters.
        adapters: one per adapted module, in the order of the layout.

    Raises:
        ConfigError: there is no adapter, an adapter lacks a factor, or ranks differ.
    """

    def __init__(self, layout: Layout):
        self.layout, self.adapters = layout, _find_adapters(layout)

    @property
    def num_modules(self) -> int:
        """N, the number of adapted modules."""
        return len(self.adapters)

    @property
    def rank(self) -> int:
        """r_G, the rank of every adapter."""
        return self.adapters[0].rank

    @cached_property
    def factors(self) -> dict[Factor, Mask]:
        """All entries of each factor."""
        every_slot = torch.ones(self.num_modules * self.rank, dtype=torch.bool)
        return {"A": self.build_mask(every_slot, "A"), "B": self.build_mask(every_slot, "B")}

    @cached_property
    def other_entries(self) -> Mask:
        """Entries that belong to no factor, such as a trained head."""
        return ~(self.factors["A"] | self.factors["B"])

    def get_slot_widths(self, factor: Factor) -> Tensor:
        """Return the number of scalars of each slot, int64 ``(N * r,)``."""
        return torch.tensor([adapter.get_slot_width(factor) for adapter in self.adapters]).repeat_interleave(self.rank)

    def build_mask(self, selected: Tensor, factor: Factor) -> Mask:
        """Return the entries of one factor in the slots ``selected``, bool ``(N * r,)``."""
        bits = torch.zeros(self.layout.size, dtype=torch.bool)
        for adapter, ranks in zip(self.adapters, selected.split(self.rank), strict=True):
            adapter.view_slots(bits, factor)[ranks] = True
        return Mask(bits)

    def select_first(self, rank: int) -> Mask:
        """Return the entries of both factors in the first ``rank`` slots of every module."""
        selected = (torch.arange(self.rank) < rank).repeat(self.num_modules)
        return self.build_mask(selected, "A") | self.build_mask(selected, "B")

    def find_slots(self, mask: Mask, factor: Factor) -> Tensor | None:
        """Return the slots that a mask consists of, bool ``(N * r,)``.

        None if the mask cuts a slot or selects entries of the other factor. Entries of no factor are ignored.
        """
        selected = torch.cat([adapter.view_slots(mask.bits, factor).any(1) for adapter in self.adapters])
        return selected if self.build_mask(selected, factor) == mask - self.other_entries else None

    def compute_norms(self, vector: Tensor, factor: Factor) -> Tensor:
        """Return the L2 norm of every slot, ``(N * r,)``."""
        return torch.cat([torch.linalg.vector_norm(a.view_slots(vector, factor), dim=1) for a in self.adapters])

    def compute_sums(self, vector: Tensor, factor: Factor) -> Tensor:
        """Return the sum of the entries of every slot, ``(N * r,)``."""
        return torch.cat([a.view_slots(vector, factor).sum(1) for a in self.adapters])


def compute_slot_scores(slots: Slots, delta: Tensor, weights: Tensor, active: Factor) -> Tensor:
    """Compute the score of every slot, ``(N * r,)``: ``||dB[:, i] A[i, :]||_F`` in a B round (LoRA-A2, Eq. 4;
    docs/algorithms.md, section 4.3).

    Args:
        slots: slots of the layout.
        delta: ``(P,)`` delta of the active factor after the trial epoch.
        weights: ``(P,)`` weights; the inactive factor is read from them.
        active: the factor that trains in this round.
    """
    # The Frobenius norm of a rank-1 matrix is the product of the two vectors' norms, so no d1 x d2 product is formed.
    return slots.compute_norms(delta, active) * slots.compute_norms(weights, "A" if active == "B" else "B")


def select_slots(slots: Slots, scores: Tensor, budget: int, active: Factor, *, per_scalar: bool = False) -> Mask:
    """Select the slots that a site trains and sends; return their entries of the active factor.

    Args:
        slots: slots of the layout.
        scores: ``(N * r,)``.
        budget: rank budget r_k of the site; more than r_G counts as r_G.
        active: the factor that trains in this round.
        per_scalar: False selects the ``r_k * N`` highest scores of the whole model, ties to the lowest slot (the
            paper). True limits the number of scalars to that of ``r_k`` ranks of every module, and takes slots in the
            order of score per scalar as long as they fit.

    Raises:
        UndefinedScores: a score is NaN.
    """
    budget = min(budget, slots.rank)
    if not per_scalar:
        return slots.build_mask(top_k(scores, budget * slots.num_modules).bits, active)
    widths = slots.get_slot_widths(active)
    remaining = budget * int(widths.sum()) // slots.rank
    # NaN has no place in the order below; top_k raises UndefinedScores for it.
    top_k(scores, 0)
    selected = torch.zeros(scores.numel(), dtype=torch.bool)
    # The sort is stable, so that ties go to the lowest slot on every machine.
    for slot in torch.sort(scores / widths, descending=True, stable=True).indices.tolist():
        if widths[slot] <= remaining:
            selected[slot] = True
            remaining -= int(widths[slot])
    return slots.build_mask(selected, active)


def _find_adapters(layout: Layout) -> tuple[Adapter, ...]:
    factors_by_module: dict[str, dict[str, tuple[TensorSpec, int]]] = {}
    for spec, start in zip(layout.tensors, layout.offsets, strict=False):
        if match := FACTOR_NAME.fullmatch(spec.name):
            factors_by_module.setdefault(match[1], {})[match[2]] = (spec, start)
    if not factors_by_module:
        raise ConfigError(
            "the network has no LoRA adapters, which this method exchanges; a task of this package adds them with "
            "task.adapter: {rank: 16}, a network of your own with peft.get_peft_model in its class (docs/lora.md)"
        )
    adapters = []
    for module, factors in factors_by_module.items():
        if factors.keys() != {"A", "B"}:
            raise ConfigError(f"adapter of {module!r}: only factor {sorted(factors)} is trainable; both must be")
        (a, a_start), (b, b_start) = factors["A"], factors["B"]
        adapters.append(Adapter(module, a, b, a_start, b_start))
    ranks = {(adapter.a.shape[0], adapter.b.shape[1]) for adapter in adapters}
    if len(ranks) > 1 or any(r != q for r, q in ranks):
        raise ConfigError(f"adapters of ranks {sorted(ranks)} (A, B); all must have the same rank")
    return tuple(adapters)
