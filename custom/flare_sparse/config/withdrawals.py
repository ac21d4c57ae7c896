"""Subjects and sites that have withdrawn from a run: a list in its result folder, which every reader of data heeds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, DataError
from ..tasks.data.absence import narrow_absence
from ..tasks.task import SiteData

WITHDRAWN = "withdrawn.json"


@dataclass(frozen=True)
class Withdrawals:
    """Who has left a run.

    Attributes:
        subjects: identifiers of subjects, or of examples.
        sites: names of sites.
        note: what this means for the model in the folder.
        id: column of the table with the identifiers of the subjects; None: names of files, or of the task's examples.
    """

    subjects: frozenset[str] = frozenset()
    sites: frozenset[str] = frozenset()
    note: str = ""
    id: str | None = None

    @classmethod
    def read(cls, folder: Path) -> Withdrawals:
        """Return the withdrawals of the run in a result folder; none without a list.

        Raises:
            ConfigError: the list cannot be read. A list that is not read would let data back in.
        """
        file = folder / WITHDRAWN
        if not file.exists():
            return cls()
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            return cls(frozenset(content["subjects"]), frozenset(content["sites"]), str(content["note"]), content["id"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{file}: cannot be read ({error}); it lists what must not be used. Restore it"
            ) from error

    def write(self, folder: Path) -> None:
        """Write the list into a result folder."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"subjects": sorted(self.subjects), "sites": sorted(self.sites), "note": self.note, "id": self.id}
        write_json(folder / WITHDRAWN, content)
        (folder / WITHDRAWN).chmod(0o600)

    def merge(self, other: Withdrawals) -> Withdrawals:
        """Return this list with those of another one; note and column are this one's where it has them."""
        subjects, sites = self.subjects | other.subjects, self.sites | other.sites
        return replace(self, subjects=subjects, sites=sites, id=self.id or other.id)

    def inherit(self, folder: Path) -> None:
        """Add the list to that of a folder, whose run begins from the settings or the state of this one."""
        own = Withdrawals.read(folder)
        merged = own.merge(self)
        if merged != own:
            replace(merged, note=own.note or "This model was trained without them.").write(folder)

    def open(self, data: SiteData) -> SiteData:
        """Return data at hand, without the subjects in it who have withdrawn.

        Raises:
            DataError: the data does not say whose an example is.
        """
        return narrow_absence(data, self.subjects, self.id)

    def describe(self) -> str:
        """Return what has withdrawn, by number of subjects and name of sites, and the note; empty without any."""
        parts = [f"{len(self.subjects)} subject{'s' * (len(self.subjects) != 1)}"] if self.subjects else []
        parts += [f"site {name}" for name in sorted(self.sites)]
        return f"Withdrawn: {', '.join(parts)}. {self.note}" if parts else ""


def open_data(run: Path, data: Path, site: str) -> SiteData:
    """Return data at hand, to which a run's model is applied, without the subjects in it who have withdrawn.

    Args:
        run: result folder of the run.
        data: the folder or file that a site file would name.
        site: name of the data.

    Raises:
        DataError: there is no such data, or it does not say whose an example is.
    """
    if not data.exists():
        raise DataError(f"--data {data}: there is no file or folder of this name; correct the path")
    return Withdrawals.read(run).open(SiteData(site, data.resolve()))
