"""Checkpoints of ``flare-sparse run``: the folder ``checkpoints`` in the result folder, and ``--resume``."""

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
    bool, typer.Option("--resume", help="Continue an interrupted run in the same --out from its last committed round")
]


def prepare_checkpoints(config: RunConfig, assembly: Assembly, out: Path, *, resume: bool) -> Path:
    """Return the checkpoint folder; it is emptied unless a run is resumed.

    Raises:
        CheckpointError: there is no checkpoint, or it belongs to another job; the text names the settings that differ.
    """
    root = out / FOLDER
    if not resume:
        shutil.rmtree(root, ignore_errors=True)
        return root
    store = open_checkpoints(config.job, assembly, root, SERVER)
    if store.list_numbers():
        return root
    # A changed setting changes the job's folder below root: compare with the others there and name the difference.
    for folder in sorted(root.glob(f"*/{SERVER}")):
        Store(folder, store.identity).check()
    raise CheckpointError(
        f"--resume: {root} holds no checkpoint: the run committed no round, or it has finished. Leave --resume out "
        "to start again"
    )
