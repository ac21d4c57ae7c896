"""Bad subjects: all of them are found before training starts, and named only at their own site."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from ..errors import DataError

T = TypeVar("T")


def screen(
    ids: Iterable[str], read: Callable[[str], T], *, skip_bad_subjects: bool, source: object
) -> tuple[dict[str, T], int]:
    """What ``read`` returns for every usable subject, and the number of subjects left out.

    Args:
        ids: identifiers.
        read: raises a DataError that says what is wrong with one subject.
        skip_bad_subjects: leave them out instead of refusing to work.
        source: file or folder, for the error.

    Raises:
        DataError: a subject is bad and none may be skipped, or no subject is left; all bad ones are listed by id.
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
