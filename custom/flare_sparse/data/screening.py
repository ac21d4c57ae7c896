"""Screening of subjects: all unusable ones are found before training starts, and named only at their own site."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import DataError

T = TypeVar("T")


def screen_subjects(
    ids: Iterable[str], read: Callable[[str], T], *, skip_bad_subjects: bool, source: object
) -> tuple[dict[str, T], int]:
    """Read every subject and separate the usable from the unusable ones.

    Args:
        ids: identifiers of the subjects.
        read: reads one subject; raises a DataError if the subject is unusable.
        skip_bad_subjects: skip unusable subjects instead of raising.
        source: file or folder, named in the error.

    Returns:
        The results of ``read`` by subject, and the number of skipped subjects.

    Raises:
        DataError: a subject is unusable and may not be skipped, or no usable subject remains. The text lists every
            unusable subject by identifier.
    """
    usable: dict[str, T] = {}
    problems: list[str] = []
    for subject in ids:
        try:
            usable[subject] = read(subject)
        except DataError as error:
            problems.append(f"{subject}: {error}")
    if problems and (not skip_bad_subjects or not usable):
        count = f"{len(problems)} of {len(problems) + len(usable)} subjects cannot be used"
        remedy = "Repair or remove them" + ("." if skip_bad_subjects else ", or set task.skip_bad_subjects: true.")
        raise DataError("\n  ".join([f"{source}: {count}:", *problems]) + f"\n{remedy}")
    if not usable:
        raise DataError(f"{source}: there are no subjects; expected at least one")
    return usable, len(problems)
