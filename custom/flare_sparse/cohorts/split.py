"""Split of a site's examples into training, validation and test: a function of seed and identifiers alone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, Self

from pydantic import Field, model_validator

from ..core.settings import Settings

Ids = tuple[str, ...]
Part = Literal["all", "test", "validation", "train"]
"""Which examples of a split are evaluated."""


@dataclass(frozen=True)
class Split:
    """Disjoint identifiers, each part in the order of the hashes.

    Attributes:
        train: identifiers of the training examples.
        validation: identifiers of the examples that choose rounds and settings.
        test: identifiers of the examples that choose nothing.
    """

    train: Ids
    validation: Ids
    test: Ids


class SplitConfig(Settings):
    """Shares of a site's subjects for testing and validation, or one fold of a cross-validation."""

    test: float = Field(0.2, gt=0, lt=1)
    """share of a site's subjects for testing; folds replace it"""
    validation: float = Field(0.0, ge=0, lt=1)
    """share of a site's subjects that choose the best round and end a run early; 0: none, and the run has no best
    model, because test subjects choose nothing"""
    folds: int | None = Field(None, ge=2, le=1000)
    """number of folds: with each fold once, every subject of every site is tested once; null: one split"""
    stable: bool = False
    """the part of a subject depends on its identifier alone, so that no subject changes parts when another one leaves
    or joins; the shares then hold on average"""
    fold: int = Field(1, ge=1)
    """fold for testing, 1 to folds; fold 1 of 5 tests the subjects of one split"""

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.folds is None and self.fold != 1:
            raise ValueError(f"fold is {self.fold}, but folds is not set; set folds, such as 5")
        if self.folds is not None and self.fold > self.folds:
            raise ValueError(f"fold is {self.fold} of {self.folds} folds; expected 1 to {self.folds}")
        test = self.test if self.folds is None else 1 / self.folds
        if test + self.validation >= 1:
            raise ValueError(
                f"validation {self.validation:g} and the {test:g} for testing leave no subject for training; lower one"
            )
        return self

    def assign(self, ids: Iterable[str], seed: int) -> Split:
        """Split identifiers into training, validation and test.

        Identifiers are sorted by ``sha256("<seed>:<id>")``. Without folds, the first ``round(test * n)`` are for
        testing, at least one if there are two or more; the default is the 80 to 20 split within each site of NeuroSFL,
        section 4.2. With folds, the order is cut into ``folds`` parts of nearly equal length, and part ``fold`` is for
        testing. The next ``round(validation * n)``, from the start again after the end, are for validation, at least
        one if two or more remain.
        """
        if self.stable:
            return self._assign_each(ids, seed)
        ordered = sorted(ids, key=lambda name: sha256(f"{seed}:{name}".encode()).digest())
        start, end = self._locate_test(len(ordered))
        remaining = ordered[end:] + ordered[:start]
        count = 0
        if self.validation and len(remaining) > 1:
            count = min(max(round(self.validation * len(ordered)), 1), len(remaining) - 1)
        return Split(tuple(remaining[count:]), tuple(remaining[:count]), tuple(ordered[start:end]))

    def assign_subjects(self, subject_of: Mapping[str, str], seed: int) -> Split:
        """Split examples by their subjects, so that all of a subject are in one part.

        Args:
            subject_of: subject of each example.
            seed: as in :meth:`assign`.
        """
        examples: dict[str, list[str]] = {}
        for name, subject in subject_of.items():
            examples.setdefault(subject, []).append(name)
        found = self.assign(examples, seed)
        parts = (found.train, found.validation, found.test)
        return Split(*(tuple(name for subject in part for name in examples[subject]) for part in parts))

    def _assign_each(self, ids: Iterable[str], seed: int) -> Split:
        """Split by each identifier's hash alone, as a number from 0 to 1 in place of its rank."""
        positions = {name: place(f"{seed}:{name}") for name in ids}
        start = (self.fold - 1) / self.folds if self.folds else 0.0
        width = 1 / self.folds if self.folds else self.test
        parts: tuple[list[str], ...] = ([], [], [])
        for name in sorted(positions, key=positions.__getitem__):
            # Measure the distance from the first test subject, around the circle of hashes.
            distance = (positions[name] - start) % 1
            parts[2 if distance < width else 1 if distance < width + self.validation else 0].append(name)
        return Split(*(tuple(part) for part in parts))

    def _locate_test(self, count: int) -> tuple[int, int]:
        """Return where the test identifiers start and end in the order of the hashes."""
        if self.folds is None:
            return 0, max(round(self.test * count), 1 if count > 1 else 0)
        # Set no minimum of one: a subject of a site smaller than the number of folds would be tested twice.
        return round((self.fold - 1) * count / self.folds), round(self.fold * count / self.folds)


def place(text: str) -> float:
    """Return the SHA-256 of a text as a number from 0, inclusive, to 1, exclusive."""
    # 53 bits are exact in a float, and less than 1 after the division.
    return (int.from_bytes(sha256(text.encode()).digest()[:8], "big") >> 11) / 2**53
