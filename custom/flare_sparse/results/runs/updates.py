"""The sites' updates that a run keeps for an audit."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...core.exchange import Contribution

UPDATES = "updates"
"""Folder with the updates, in the result folder."""
_NAME = re.compile(r"round-(\d+)-(.+)\.npz")


@dataclass(frozen=True)
class RecordedUpdate:
    """One update as the server decoded it.

    Attributes:
        round: number of the round.
        site: name of the site.
        content: weights, delta or scores.
        values: float32 ``(P,)``; 0 for entries that were not sent.
    """

    round: int
    site: str
    content: str
    values: np.ndarray


def write_updates(folder: Path, round_number: int, updates: Sequence[Contribution]) -> None:
    """Write a file for each update with values."""
    folder.mkdir(exist_ok=True)
    for update in updates:
        if update.content != "metrics":
            np.savez(
                folder / f"round-{round_number}-{update.site}.npz",
                values=update.patch.values.numpy(),
                mask=np.packbits(update.patch.mask.bits.numpy()),
                size=np.array(update.patch.mask.bits.numel()),
                content=np.array(update.content),
            )


def read_updates(folder: Path) -> Iterator[RecordedUpdate]:
    """Yield the recorded updates by round and site; none without a record."""
    files = [(match, file) for file in folder.glob("*.npz") if (match := _NAME.fullmatch(file.name))]
    for match, file in sorted(files, key=lambda item: (int(item[0][1]), item[0][2])):
        with np.load(file) as stored:
            values = np.zeros(int(stored["size"]), dtype=np.float32)
            values[np.unpackbits(stored["mask"], count=len(values)).astype(bool)] = stored["values"]
            yield RecordedUpdate(int(match[1]), match[2], str(stored["content"]), values)
