"""Groups of entries that a site reveals together, and the two ways to select among them: by rate and by budget.

The groups of a network (SCBF, section 3.2; docs/algorithms.md, section 3.7):

* the row of weights of a unit that reads the network's input;
* the kernel, or the weights of a flattened channel, between two units;
* a unit's bias with the scale and shift of its normalisation;
* a unit's running statistics.

Entries that belong to no unit are always revealed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ....core.errors import SelectionError, UndefinedScores
from ....core.mask import Mask, floor_fraction, top_k
from ....core.params import Layout

Selection = Literal["positive", "negative"]
Biases = Literal["selected", "never", "all"]
Kind = Literal["weight", "bias", "statistic", "always"]
INFINITY = float("inf")


@dataclass(frozen=True)
class GroupSection:
    """Consecutive groups of one kind.

    Attributes:
        kind: kind of all these groups.
        count: number of groups; each tensor is cut into that many equal parts along its leading axes.
        tensors: names of the tensors.
        transposed_blocks: for the weight of a transposed convolution, which has the input channels on its leading axis,
            its number of ``groups``; the tensor is cut by its output channels then. 0 for all other tensors.
    """

    kind: Kind
    count: int
    tensors: tuple[str, ...]
    transposed_blocks: int = 0

    def view_by_group(self, tensor: Tensor) -> Tensor:
        """Return a view of one of the tensors, ``(blocks, groups of a block, entries, entries)``; groups in order."""
        if not self.transposed_blocks:
            return tensor.view(1, self.count, -1, 1)
        outputs = self.count // self.transposed_blocks
        inputs = tensor.shape[0] // self.transposed_blocks
        return tensor.view(self.transposed_blocks, inputs, outputs, -1).transpose(1, 2)


class Groups(ABC):
    """The groups of a network, and the selection of those that a site reveals of its delta.

    Args:
        layout: layout of the network.
        sections: the groups; tensors that they do not name are always revealed.
        biases: whether groups of kind ``bias`` are revealed with the selected units, never, or always.
    """

    description: str
    """Summary of the groups, as display text."""
    threshold_description: str
    """How the threshold of a rate is computed, as display text."""

    def __init__(self, layout: Layout, sections: Sequence[GroupSection], biases: Biases):
        self.layout, self._biases = layout, biases
        section_tensors = {name for section in sections for name in section.tensors}
        other_tensors = tuple(spec.name for spec in layout.tensors if spec.name not in section_tensors)
        sections = [*sections, *(GroupSection("always", 1, (name,)) for name in other_tensors)]
        self._group_of = torch.empty(layout.size, dtype=torch.int64)
        tensors, first = layout.unflatten(self._group_of), 0
        for section in sections:
            for name in section.tensors:
                view = section.view_by_group(tensors[name])
                view[:] = torch.arange(first, first + section.count).view(*view.shape[:2], 1, 1)
            first += section.count
        self.count = first
        self._num_always = len(other_tensors)
        self._kinds = np.repeat([section.kind for section in sections], [section.count for section in sections])
        parameters = self._group_of[: layout.num_parameters]
        self._parameter_counts = torch.bincount(parameters, minlength=self.count)

    @abstractmethod
    def select_groups(
        self, delta: Tensor, rate: float, selection: Selection, generator: torch.Generator
    ) -> list[Tensor]:
        """Return which groups the top ``rate`` reveals: bool tensors, one value per group, in the sections' order."""

    @abstractmethod
    def compute_scores(self, delta: Tensor) -> list[Tensor]:
        """Return the largest path norm through each group: float64 tensors, one value per group, likewise."""

    def select_by_rate(self, delta: Tensor, rate: float, selection: Selection, generator: torch.Generator) -> Mask:
        """Select the entries revealed by the ``ceil(rate * paths)`` most active channel paths.

        Args:
            delta: ``(P,)`` delta of local training.
            rate: alpha, above 0; 1 reveals everything (except biases with ``biases="never"``).
            selection: "positive" reveals a group that at least one selected path passes through, "negative" a group
                that only selected paths pass through.
            generator: source of randomness for networks with too many paths to list.

        Raises:
            UndefinedScores: an entry of the delta is not finite.
        """
        _require_finite(delta)
        if rate == 1:
            return self._build_mask(torch.ones(self.count, dtype=torch.bool))
        return self._build_mask(self._append_always(self.select_groups(delta, rate, selection, generator), True))

    def select_by_budget(self, delta: Tensor, fraction: float) -> Mask:
        """Select exactly ``floor(fraction * parameters)`` parameters, those on the most active paths first.

        Whole groups are taken in the order of the largest path norm through them; of the group in which the budget
        ends, the largest deltas. Running statistics are not parameters and do not count; they are revealed with the
        units whose bias would be. Entries that are always revealed are so even beyond the budget.

        Args:
            delta: ``(P,)`` delta of local training.
            fraction: share of all trainable parameters, 0 to 1.

        Raises:
            UndefinedScores: an entry of the delta is not finite.
            SelectionError: ``biases="never"`` leaves fewer parameters than the budget.
        """
        _require_finite(delta)
        scores = self._append_always(self.compute_scores(delta), INFINITY)
        if self._biases == "all":
            scores[torch.from_numpy(self._kinds == "bias")] = INFINITY
        costs = torch.where(self._find_allowed(), self._parameter_counts, 0)
        budget = floor_fraction(fraction, self.layout.num_parameters)
        if int(costs.sum()) < budget:
            raise SelectionError(
                f"a budget of {budget} parameters exceeds the {int(costs.sum())} that may be revealed: lower the budget"
            )
        # The sort is stable: groups with equal scores keep their order in the layout on every machine.
        order = torch.from_numpy(np.argsort(-scores.numpy(), kind="stable"))
        cumulative_cost = costs[order].cumsum(0)
        num_whole = int(torch.searchsorted(cumulative_cost, budget, right=True)) if budget else 0
        selected = scores == INFINITY
        selected[order[:num_whole]] = True
        mask, remaining = self._build_mask(selected), budget - int(costs[selected].sum())
        if remaining > 0:
            mask = mask | top_k(delta.abs(), remaining, within=Mask(self._group_of == order[num_whole]))
        return mask

    def _append_always(self, parts: Sequence[Tensor], value: bool | float) -> Tensor:
        """Join the sections' values into one tensor and append ``value`` for the groups that are always revealed."""
        flat = [part.flatten() for part in parts]
        return torch.cat([*flat, torch.full((self._num_always,), value, dtype=flat[0].dtype)])

    def _find_allowed(self) -> Tensor:
        forbidden = "bias" if self._biases == "never" else ""
        return torch.from_numpy(self._kinds != forbidden)

    def _build_mask(self, selected: Tensor) -> Mask:
        """Return the entries of the selected groups after applying the rule for biases."""
        if self._biases == "all":
            selected = selected | torch.from_numpy(self._kinds == "bias")
        return Mask((selected & self._find_allowed())[self._group_of])


def _require_finite(delta: Tensor) -> None:
    if not bool(torch.isfinite(delta).all()):
        count = int((~torch.isfinite(delta)).sum())
        raise UndefinedScores(f"{count} of {delta.numel()} entries of the delta are not finite; nothing is selected")
