"""Absence of subjects who have withdrawn: their rows or files by the site's own identifiers, which no job chooses."""

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ...core.errors import DataError
from ...core.names import describe_unknown, format_names, list_beginnings
from ..task import SiteData
from .bids import TABLE, read_rows
from .tables import Table, read_table

_DEPTH = 4
"""Levels of folders whose names may be those of subjects: data set, kind of the data, subject, session."""


def find_absent_rows(data: SiteData, table: Table) -> frozenset[int]:
    """Return the rows, from 0, of subjects who have withdrawn: their text in the site's own column.

    Raises:
        DataError: the site names no column, or a row does not say whose it is.
    """
    if not data.withdrawn:
        return frozenset()
    return frozenset(row for row, name in enumerate(_read_names(data, table)) if name in data.withdrawn)


def require_known_subjects(data: SiteData) -> SiteData:
    """Return a site's data, of which each withdrawn subject is known to be a part, so that it is known to be left out.

    Raises:
        DataError: an identifier is nobody's in the data, or two subjects' of a folder of data sets, or the data does
            not say whose an example is.
    """
    if not data.withdrawn:
        return data
    people = list_people(data)
    shown = {name.rpartition("/")[2] for name in people} if data.path.is_dir() else people
    if unknown := sorted(data.withdrawn - people - shown):
        raise DataError(
            f"{data.path}: {len(unknown)} of {len(data.withdrawn)} withdrawn identifiers match nothing (first: "
            f"{describe_unknown(unknown[0], people, 'the data')}). Nothing is read as long as it is unknown whom they "
            "stand for: correct them, or take those off the list whose data was removed"
        )
    for name in sorted(data.withdrawn):
        if len(sets := sorted({found.rpartition("/")[0] for found in people if found.endswith(f"/{name}")})) > 1:
            raise DataError(
                f"{data.path}: the withdrawn identifier {name!r} is a subject of {' and of '.join(sets)}; write "
                f"{sets[0]}/{name} for the one, and the other too if it is the same person"
            )
    return replace(data, people=people | shown)


def narrow_absence(data: SiteData, withdrawn: Collection[str], column: str | None) -> SiteData:
    """Return data with those of some withdrawn subjects who are in it: the lists of a run name those of all sites.

    Raises:
        DataError: the data does not say whose an example is, or is one file, of one of them.
    """
    own = replace(data, withdrawn=frozenset(withdrawn), id=column)
    if not withdrawn or (column is None and not data.path.is_dir()):
        if found := own.withdrawn & list_beginnings(data.path.name):
            raise DataError(f"{data.path}: is of the subject {min(found)!r}, who has withdrawn; it must not be used")
        return own
    people = list_people(own)
    names = people | {name.rpartition("/")[2] for name in people}
    return replace(own, withdrawn=own.withdrawn & names, people=names)


def list_people(data: SiteData) -> frozenset[str]:
    """Return the names of which some are subjects: the site's column of a table, or parts of the names of files.

    Of a folder of data sets they are ``DATA SET/NAME``.

    Raises:
        DataError: the table names no column, or a row does not say whose it is.
    """
    if not data.path.is_dir():
        _name_column(data)
        return frozenset(_read_names(data, read_table(data.path)))
    sets = [folder for folder in sorted(data.path.iterdir()) if (folder / TABLE).is_file()]
    if (data.path / TABLE).is_file() or not sets:
        return frozenset(_list_parts(data.path))
    return frozenset(f"{folder.name}/{part}" for folder in sets for part in _list_parts(folder))


def _name_column(data: SiteData) -> str:
    """Return the site's column of identifiers; raise DataError if the site names none."""
    if data.id is None:
        raise DataError(
            f"{data.path}: {len(data.withdrawn)} subjects have withdrawn, and nothing says which rows are theirs; "
            f"expected id: COLUMN, the column of identifiers, in the site file of {data.site}"
        )
    return data.id


def _read_names(data: SiteData, table: Table) -> list[str]:
    column = _name_column(data)
    # Not get_names: a job's codes for missing values must not hide an identifier.
    names = format_names(table.get_column(column))
    if "" in names:
        raise DataError(
            f"{table.source}: row {names.index('') + 1} has no {column}, and {len(data.withdrawn)} subjects have "
            "withdrawn: nothing says whether it is theirs; fill in the identifier, or remove the row"
        )
    return names


def _list_parts(folder: Path) -> set[str]:
    """Return the names of a folder's files and folders, and their beginnings up to a mark: ``case_1`` of
    ``case_1_0000.nii.gz``; with them the names in ``participants.tsv``, whose images may be missing.
    """
    parts = set(read_rows(folder / TABLE)) if (folder / TABLE).is_file() else set()
    for root, folders, files in os.walk(folder):
        if len(Path(root).relative_to(folder).parts) >= _DEPTH - 1:
            folders.clear()
        for name in (*folders, *files):
            parts |= list_beginnings(name)
    return parts
