"""Reading of examples a minibatch at a time."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


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

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Return the examples of a minibatch; loaders call this method instead of reading them one by one.

        Rows of tensors are a ``TensorDataset`` again, whose tensors need not be stacked.
        """
        dataset = self._dataset
        # A subclass may change what it returns.
        if type(dataset) is TensorDataset and len(indices) > 0:
            return TensorDataset(*(rows[list(indices)] for rows in dataset.tensors))
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


def stack_examples(examples: Any) -> Any:
    """Return the minibatch of some examples: each of their tensors stacked, as torch's ``default_collate`` does."""
    return list(examples.tensors) if isinstance(examples, TensorDataset) else default_collate(list(examples))
