"""Damage to the checkpoints of a federation between a kill and the next submission."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from .federation import SERVER, SITES, Federation, Unexpected

MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
VICTIM = "site-2"


def _flip_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


WAYS: dict[str, Callable[[Path], None]] = {
    "dropped": lambda folder: (folder / TENSORS).unlink(),
    "truncated": lambda folder: (folder / TENSORS).write_bytes((folder / TENSORS).read_bytes()[:-8]),
    "flipped": lambda folder: _flip_byte(folder / TENSORS),
    "manifest flipped": lambda folder: _flip_byte(folder / MANIFEST),
    "manifest emptied": lambda folder: (folder / MANIFEST).write_bytes(b""),
}
"""By name: what happens to the folder of one checkpoint."""

ENDS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "server's newest": ((SERVER,), 1),
    "server's, all": ((SERVER,), None),
    "a site's newest": ((VICTIM,), 1),
    "a site's, all": ((VICTIM,), None),
    "everyone's newest": ((SERVER, *SITES), 1),
}
"""By name: the participants, and how many of their newest checkpoints are damaged; None: all."""


def damage_checkpoints(federation: Federation, ends: str, way: str) -> list[str]:
    """Damage the checkpoints of ``ends`` in one way; return participant and number of each.

    Raises:
        Unexpected: there are no checkpoints.
    """
    participants, count = ENDS[ends]
    damaged = []
    for name in participants:
        folders = sorted(
            (
                folder
                for folder in (federation.kits / name / "checkpoints").glob("*/*/*")
                if re.fullmatch(r"\d{8}", folder.name)
            ),
            key=lambda folder: folder.name,
            reverse=True,
        )
        if not folders:
            raise Unexpected(f"{name} has no checkpoints")
        for folder in folders[:count]:
            WAYS[way](folder)
            damaged.append(f"{name} {int(folder.name)}")
    return damaged
