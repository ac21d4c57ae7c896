"""Folders of a data set whose sites are its folders, and those that hold no data."""

from pathlib import Path

from ..task import Cohort

_NO_SITES = frozenset({"code", "derivatives", "docs", "logs", "lost+found", "phenotype", "sourcedata", "stimuli"})
"""Folders beside sites that hold no data of subjects: those of BIDS, and of file systems."""


def list_folders_without_examples(path: Path, cohort: Cohort) -> list[str]:
    """Return the folders of a data set of several sites that no example is from, in name order.

    Args:
        path: folder of the data.
        cohort: its examples; of several sites, their identifiers are ``FOLDER/NAME``. With other identifiers, the
            folders are no sites.
    """
    sites = {name.partition("/")[0] for name in cohort.ids}
    if not path.is_dir() or not all("/" in name for name in cohort.ids):
        return []
    folders = {folder.name for folder in path.glob("*/") if not folder.name.startswith((".", "_"))}
    # Identifiers of a user task may have a slash of their own.
    return sorted(folders - sites - _NO_SITES) if sites <= folders else []
