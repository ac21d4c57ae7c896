"""How many of a site's examples stand behind an answer: counted where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset


@dataclass(frozen=True)
class SampleUsage:
    """What an answer was computed with: distinct training examples, and minibatches."""

    examples: int = 0
    batches: int = 0


class CountingDataset(Dataset[Any]):
    """A site's training examples, as they are, with a note of which a loader read."""

    def __init__(self, examples: Any):
        self._examples = examples
        self.reset()

    def reset(self) -> None:
        """Nothing was read."""
        self._indices: set[int] = set()
        self._batches = 0

    @property
    def usage(self) -> SampleUsage:
        """Since the last reset."""
        return SampleUsage(len(self._indices), self._batches)

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Any:
        self._indices.add(index)
        return self._examples[index]

    def __getitems__(self, indices: list[int]) -> Any:
        """A loader reads a minibatch at once, and the examples may have a way to do so."""
        self._indices.update(indices)
        self._batches += 1
        at_once = getattr(self._examples, "__getitems__", None)
        return at_once(indices) if at_once else [self._examples[index] for index in indices]
