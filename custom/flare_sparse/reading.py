"""Reading of examples a minibatch at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset, TensorDataset


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

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the examples of a minibatch; loaders call this method instead of reading them one by one."""
        dataset = self._dataset
        # A subclass may change what it returns.
        if type(dataset) is TensorDataset and len(indices) > 0:
            return list(zip(*(rows[list(indices)].unbind() for rows in dataset.tensors), strict=True))
        read_all = getattr(dataset, "__getitems__", None)
        return list(read_all(indices)) if read_all else [dataset[index] for index in indices]
