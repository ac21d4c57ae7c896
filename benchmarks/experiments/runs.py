"""Parts that the experiments share: which process writes a file, and one run in this process."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flare_sparse.assemble import Assembly, build_rules
from flare_sparse.config import RunConfig
from flare_sparse.federation import Outcome
from flare_sparse.local.run import run_locally
from flare_sparse.training import Site
from flare_sparse.wire.ledger import Ledger

CONFIGS = Path(__file__).resolve().parents[2] / "app_configs"


@contextmanager
def claim(file: Path) -> Iterator[bool]:
    """Yield whether this process is to write the file: it is missing and no other process writes it.

    The lock ends with its process, so that a killed run can start again.
    """
    with file.with_suffix(".claimed").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield not file.exists()


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file that is complete or absent, whenever the process ends."""
    part = file.with_suffix(".new")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(file)


def run_rounds(config: RunConfig, assembly: Assembly, sites: Mapping[str, Site]) -> tuple[Outcome, Ledger]:
    """Run all rounds in this process over the real messages, without checkpoints."""
    return run_locally(
        assembly.method,
        assembly.weights,
        sites,
        assembly.task.metric,
        values=config.wire.values,
        run=assembly.run_id,
        rules=build_rules(config),
    )
