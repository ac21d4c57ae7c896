"""Where ``run`` and ``rehearse`` keep checkpoints: ``checkpoints`` in the result folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..assemble import Assembly, open_checkpoints
from ..checkpoint.store import Store
from ..config import RunConfig
from ..endpoints.server import SERVER
from ..errors import CheckpointError

FOLDER = "checkpoints"
Resume = Annotated[
    bool, typer.Option("--resume", help="go on from the last commit of a run that was cut short, in the same --out")
]


def checkpoint_root(config: RunConfig, assembly: Assembly, out: Path, *, resume: bool) -> Path:
    """The folder, empty unless a run is resumed.

    Raises:
        CheckpointError: there is nothing to go on from, or it is of another job; the text says what differs.
    """
    root = out / FOLDER
    if not resume:
        shutil.rmtree(root, ignore_errors=True)
        return root
    mine = open_checkpoints(config.job, assembly, root, SERVER)
    if mine.list_numbers():
        return root
    for other in sorted(root.glob(f"*/{SERVER}")):
        Store(other, mine.belongs).check()
    raise CheckpointError(
        f"--resume: {root} holds no checkpoint: the run never committed a round, or it is over. Leave --resume out"
    )
