"""Reading of examples a minibatch at a time."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class StackedExamples(Sequence[tuple[Tensor, ...]]):
    """The examples of a minibatch as rows of tensors, ready for training.

    Args:
        columns: tensors of the same length, ``(B, ...)`` each.
    """

    def __init__(self, columns: list[Tensor]):
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    @overload
    def __getitem__(self, index: int) -> tuple[Tensor, ...]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Tensor, ...]]: ...

    def __getitem__(self, index: int | slice) -> tuple[Tensor, ...] | Sequence[tuple[Tensor, ...]]:
        rows = [column[index] for column in self.columns]
        return StackedExamples(rows) if isinstance(index, slice) else tuple(rows)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(column.unbind() for column in self.columns), strict=True)


class MinibatchReader(Dataset[Any]):
    """A dataset whose minibatches are read at once where its examples are rows of tensors.

    torch's ``TensorDataset`` reads one example at a time, which takes longer than a training step of a small network.

    Args:
        dataset: any dataset with a length.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        """Return the examples of a minibatch; loaders call this method instead of reading them one by one."""
        dataset = self._dataset
        # A subclass may change what it returns.
        if type(dataset) is TensorDataset and len(indices) > 0:
            return StackedExamples([rows[list(indices)] for rows in dataset.tensors])
        read_all = getattr(dataset, "__getitems__", None)
        return list(read_all(indices)) if read_all else [dataset[index] for index in indices]


def move_batch(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Return a minibatch with its tensors on a device; what is no tensor, list, tuple or dict stays as it is.

    Args:
        batch: the minibatch.
        device: where to compute.
        channels_last: store images ``(B, c, h, w)`` and volumes ``(B, c, d, h, w)`` with their channels last.
    """
    if isinstance(batch, Tensor):
        # From pinned memory the copy to a GPU runs beside the computation of the minibatch before.
        pinned = device.type == "cuda" and batch.device.type == "cpu"
        moved = (batch.pin_memory() if pinned else batch).to(device, non_blocking=pinned)
        if channels_last and moved.dim() in _CHANNELS_LAST:
            return moved.contiguous(memory_format=_CHANNELS_LAST[moved.dim()])
        return moved
    move = partial(move_batch, device=device, channels_last=channels_last)
    if isinstance(batch, dict):
        return {key: move(value) for key, value in batch.items()}
    return type(batch)(map(move, batch)) if isinstance(batch, (list, tuple)) else batch


def stack_examples(examples: Sequence[Any]) -> Any:
    """Return the minibatch of some examples: each of their tensors stacked, as torch's ``default_collate`` does."""
    return examples.columns if isinstance(examples, StackedExamples) else default_collate(list(examples))
