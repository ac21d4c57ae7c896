"""Records of subjects: a subject, such as a patient, may have several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Subjects:
    """Records of each subject of a site.

    Attributes:
        records: positions of a subject's training examples, by subject.
        names: identifiers of the training examples, in order; part of what decides an answer.
    """

    records: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    @classmethod
    def group(cls, count: int, names: Sequence[str], subjects: Sequence[str]) -> Subjects:
        """Group training examples by subject.

        Args:
            count: number of training examples.
            names: their identifiers; empty: not known.
            subjects: the subject of each; empty: every example is a subject of its own.
        """
        records: dict[str | int, list[int]] = {}
        keys: Sequence[str | int] = subjects or range(count)
        for index, subject in enumerate(keys):
            records.setdefault(subject, []).append(index)
        return cls(tuple(map(tuple, records.values())), tuple(names))

    def __len__(self) -> int:
        return len(self.records)
