"""Count of the training examples that an update was computed from, taken where the examples are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from ..core.reading import MinibatchReader


@dataclass(frozen=True)
class SampleUsage:
    """Training data that an update was computed from.

    Attributes:
        examples: number of distinct training examples.
        batches: number of minibatches.
    """

    examples: int = 0
    batches: int = 0


class CountingDataset(Dataset[Any]):
    """A dataset that counts which of its examples and how many minibatches a loader has read.

    Attributes:
        uncounted: the same examples, for processes and samples that :meth:`count` or :meth:`count_sampling` tells of.
    """

    def __init__(self, examples: Any):
        self.uncounted = MinibatchReader(examples)
        self.reset()

    def reset(self) -> None:
        """Forget what has been read."""
        self._indices: set[int] = set()
        self._batches = 0
        self._sampled = 0

    @property
    def usage(self) -> SampleUsage:
        """Usage since the last reset."""
        return SampleUsage(max(len(self._indices), self._sampled), self._batches)

    def count(self, indices: Sequence[int]) -> None:
        """Count a minibatch."""
        self._indices.update(indices)
        self._batches += 1

    def count_sampling(self, sampled: int, batches: int) -> None:
        """Count secret samples of ``sampled`` expected examples altogether, whichever of them they draw.

        What depends on the count, such as a refusal, would else tell about the sample.
        """
        self._sampled = max(self._sampled, min(sampled, len(self)))
        self._batches += batches

    def __len__(self) -> int:
        return len(self.uncounted)

    def __getitem__(self, index: int) -> Any:
        self._indices.add(index)
        return self.uncounted[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """Return a minibatch; loaders call this method instead of reading the examples one by one."""
        self.count(indices)
        return self.uncounted.__getitems__(indices)
