"""Subjects and sites that have withdrawn from a run: a list in its result folder, which every reader of data heeds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError

WITHDRAWN = "withdrawn.json"


@dataclass(frozen=True)
class Withdrawals:
    """Who has left a run.

    Attributes:
        subjects: identifiers of subjects, or of examples.
        sites: names of sites.
        note: what this means for the model in the folder.
    """

    subjects: frozenset[str] = frozenset()
    sites: frozenset[str] = frozenset()
    note: str = ""

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
            return cls(frozenset(content["subjects"]), frozenset(content["sites"]), str(content["note"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file}: cannot be read ({error}); it lists what must not be used. Restore it"
            ) from error

    def write(self, folder: Path) -> None:
        """Write the list into a result folder."""
        folder.mkdir(parents=True, exist_ok=True)
        content = {"subjects": sorted(self.subjects), "sites": sorted(self.sites), "note": self.note}
        write_json(folder / WITHDRAWN, content)

    def describe(self) -> str:
        """Return what has withdrawn, by number of subjects and name of sites, and the note; empty without any."""
        parts = [f"{len(self.subjects)} subject{'s' * (len(self.subjects) != 1)}"] if self.subjects else []
        parts += [f"site {name}" for name in sorted(self.sites)]
        return f"Withdrawn: {', '.join(parts)}. {self.note}" if parts else ""
