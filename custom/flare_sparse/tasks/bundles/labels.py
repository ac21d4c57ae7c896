"""Values that the label maps of a MONAI bundle may have, as its loss and its network determine them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from ...core.errors import DataError
from .components import Component
from .declaration import Declaration

_SAME_VALUES = frozenset(
    "monai.transforms." + name
    for name in (
        "Orientationd", "Spacingd", "Resized", "Zoomd", "Flipd", "Rotate90d", "CropForegroundd", "CenterSpatialCropd",
        "SpatialCropd", "SpatialPadd", "DivisiblePadd", "ResizeWithPadOrCropd", "EnsureTyped", "CastToTyped",
    )
)  # fmt: skip
"""Transforms of volumes, besides the random ones, that give a label map no other labels."""
_RANDOM = "monai.transforms.Rand"


@final
@dataclass(frozen=True)
class LabelRange:
    """Labels that a loss takes.

    Attributes:
        largest: largest label; the smallest is 0.
        is_class: whether labels are numbers of classes; False: a map for each channel, with values from 0 to 1.
        ignored: label that the loss leaves out, allowed besides; None: there is none.
    """

    largest: int
    is_class: bool
    ignored: int | None

    @classmethod
    def from_declaration(cls, declaration: Declaration, remaining: Sequence[Component]) -> LabelRange | None:
        """Return the labels that the loss of a bundle takes; None if they are not known.

        Args:
            declaration: the parts of the bundle.
            remaining: transforms of training cases between the label maps to check and the loss.
        """
        channels, loss = declaration.num_outputs, declaration.loss
        changes = (c for c in remaining if "label" in c.args.get("keys", ()) and c.path not in _SAME_VALUES)
        if channels is None or any(not component.path.startswith(_RANDOM) for component in changes):
            return None
        is_class = bool(loss.find_argument("to_onehot_y")) or loss.path == "torch.nn.CrossEntropyLoss"
        # MONAI ignores to_onehot_y where the network has one channel: labels are 0 and 1.
        largest = max(channels - 1, 1) if is_class else 1
        return cls(largest, is_class, loss.find_argument("ignore_index"))

    def check(self, labels: Tensor, file: str) -> None:
        """Check the label map of a case after the transforms.

        Args:
            labels: the label map.
            file: name of its file, for errors.

        Raises:
            DataError: a label is out of range, or a fraction where labels are numbers of classes.
        """
        values = torch.unique(labels).double()
        values = values if self.ignored is None else values[values != self.ignored]
        # Comparisons with NaN are false.
        if self.is_class and len(fractions := values[~(values == values.round())]):
            raise DataError(
                f"{_describe(file, fractions[0])}; expected whole numbers: correct the file, or give label the mode "
                "nearest in Spacingd and Resized"
            )
        if len(others := values[~((values >= 0) & (values <= self.largest))]):
            reason = "the network has a channel for each label" if self.is_class else "the loss has no to_onehot_y"
            raise DataError(
                f"{_describe(file, others[0])}; expected 0 to {self.largest}, because {reason}: correct the file, map "
                "its labels with MapLabelValued, or correct loss or out_channels"
            )


def _describe(file: str, value: Tensor) -> str:
    return f"{file}: label {float(value):g} after the transforms of the bundle"
