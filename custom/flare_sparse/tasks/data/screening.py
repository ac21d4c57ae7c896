"""Screening of subjects: all unusable ones are found before training starts, and named only at their own site."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from ...core.errors import DataError, list_first_lines

T = TypeVar("T")
MOST_LISTED = 30
"""Most unusable subjects that an error lists: a table may have thousands of rows with the same problem."""


def screen_subjects(
    ids: Iterable[str], read: Callable[[str], T], *, skip_bad_subjects: bool, source: object
) -> tuple[dict[str, T], list[str]]:
    """Read every subject and separate the usable from the unusable ones.

    Args:
        ids: identifiers of the subjects.
        read: reads one subject; raises a DataError if the subject is unusable.
        skip_bad_subjects: skip unusable subjects instead of raising.
        source: file or folder, named in the error.

    Returns:
        The results of ``read`` by subject, and for each skipped subject why it is.

    Raises:
        DataError: a subject is unusable and may not be skipped, or no usable subject remains. The text lists
            the unusable subjects by identifier.
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
        listed = list_first_lines(problems, MOST_LISTED)
        raise DataError("\n  ".join([f"{source}: {count}:", *listed]) + f"\n{remedy}")
    if not usable:
        raise DataError(f"{source}: there are no subjects; expected at least one")
    return usable, problems
