"""Files in a result folder that grow, line by line, while a run proceeds elsewhere; the final record replaces them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .record import APPENDED_FILES, start_record

ROUNDS, LEDGER = APPENDED_FILES


class GrowingRecord:
    """Copies the lines of a run's ``rounds.jsonl`` and ``ledger.jsonl`` into a folder as they become known.

    A run reports its rounds from the first one on also after a resume, so the files start empty: no line comes twice.

    Args:
        folder: result folder; created if it does not exist.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        start_record(folder)
        self._counts = dict.fromkeys(APPENDED_FILES, 0)

    def get_count(self, name: str) -> int:
        """Return the number of lines that a file has."""
        return self._counts[name]

    def append(self, name: str, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to one of the files."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if text:
            # One write per call: a reader that follows the file sees whole lines.
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(text)
            self._counts[name] += text.count("\n")
