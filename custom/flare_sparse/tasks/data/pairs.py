"""Files of cases by patterns of their names, for data in none of the known layouts."""

import re
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import Field, field_validator

from ...core.names import clean_name
from ...core.settings import Settings

CASE = "{case}"
"""Part of a pattern that stands for the identifier of a case."""
_LETTER = r"(?:[^\W_]|-)"
_CASE_NAME = r"[^/.][^/]*?"


class Pairs(Settings):
    """Patterns of the files of a case, relative to the site's data; ``{case}`` is its identifier, ``*`` is any text."""

    images: tuple[str, ...] = Field(min_length=1)
    """image of each channel, such as imagesTr/{case}_0000.nii.gz"""
    labels: str
    """label map, such as labelsTr/{case}.nii.gz"""

    @field_validator("images", "labels")
    @classmethod
    def _check_patterns(cls, value: Any) -> Any:
        for pattern in [value] if isinstance(value, str) else value:
            path = PurePosixPath(pattern)
            # The pattern comes with a job, and the files that it may name are those of the site's data folder.
            if path.is_absolute() or ".." in path.parts or "**" in pattern:
                raise ValueError(f"{pattern!r}: expected a path inside the data folder, without .. and **")
            if CASE not in pattern:
                raise ValueError(f"{pattern!r}: expected {CASE} where the identifier of a case stands")
        return value


def match_files(folder: Path, pattern: str) -> dict[str, list[Path]]:
    """Return the files of a folder that match a pattern, by identifier of the case.

    Beside a ``*``, an identifier ends where letters, digits and ``-`` end: ``c{case}*`` finds 10 in ``c10_t1.nii.gz``.
    """
    parts = [part for part in re.split(r"(\{case\}|\*)", pattern) if part]
    # A second {case} must repeat the first one.
    text, is_first = "", True
    for before, part, after in zip(["", *parts], parts, [*parts[1:], ""], strict=False):
        if part == CASE:
            identifier = f"(?P<case>{_CASE_NAME})" if is_first else "(?P=case)"
            start, end = (rf"(?<!{_LETTER})" if before == "*" else ""), (rf"(?!{_LETTER})" if after == "*" else "")
            text, is_first = f"{text}{start}{identifier}{end}", False
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    found: dict[str, list[Path]] = {}
    # "{case}*" would become "**", which pathlib refuses.
    for file in sorted(folder.glob(re.sub(r"\*+", "*", pattern.replace(CASE, "*")))):
        # macOS writes a ._NAME without voxels beside each file that it copies.
        if not file.name.startswith(".") and (match := re.fullmatch(text, file.relative_to(folder).as_posix())):
            found.setdefault(clean_name(match["case"]), []).append(file)
    return found
