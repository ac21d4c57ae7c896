"""Values of a minibatch that are not finite: the most frequent cause of a loss that is NaN."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NonFinite:
    """Values of one tensor of a batch that are NaN or infinite.

    Attributes:
        tensor: path of the tensor, such as ``batch[0]``.
        rows: indices of the affected examples, in order.
        columns: indices of the affected columns of a tensor of shape (examples, columns); empty for other shapes.
        kind: ``"NaN"`` or ``"infinity"``.
        examples: number of examples in the tensor.
    """

    tensor: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    kind: str
    examples: int

    def __str__(self) -> str:
        columns = f", column {self.columns[0]}" if self.columns else ""
        return (
            f"{self.tensor} holds {self.kind} in {len(self.rows)} of {self.examples} examples (first: example "
            f"{self.rows[0]}{columns})"
        )


def find_non_finite(batch: Any) -> list[NonFinite]:
    """Return the tensors of a batch, its inputs and its targets, that contain NaN or infinite values."""
    parts = _iterate_tensors(batch, "batch")
    return [problem for path, tensor in parts if (problem := _inspect_tensor(path, tensor))]


def _iterate_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _iterate_tensors(part, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _iterate_tensors(part, f"{path}[{index}]")


def _inspect_tensor(path: str, tensor: Tensor) -> NonFinite | None:
    if not tensor.is_floating_point() or not tensor.dim() or bool((finite := torch.isfinite(tensor)).all()):
        return None
    per_example = ~finite.reshape(len(tensor), -1)
    rows = per_example.any(dim=1).nonzero().flatten().tolist()
    columns = per_example.any(dim=0).nonzero().flatten().tolist() if tensor.dim() == 2 else []
    kind = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
    return NonFinite(path, tuple(rows), tuple(columns), kind, len(tensor))
