"""Keys of an encrypted run in which this machine plays all parts: ``he`` in the result folder, for trying only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..assemble import assemble
from ..config import RunConfig
from ..encryption import KeyContexts
from ..runs.decrypt import decrypt_run
from ..task import Task

FOLDER = "he"


def run_contexts(config: RunConfig, out: Path, *, resume: bool) -> KeyContexts | None:
    """New keys, or those of the run that is gone on with; None when nothing is encrypted.

    Raises:
        ConfigError: TenSEAL is not installed, or a resumed run's keys are gone.
    """
    if not resume:
        shutil.rmtree(out / FOLDER, ignore_errors=True)
    if not config.encrypted:
        return None
    if resume:
        return KeyContexts.read(out / FOLDER)
    made = KeyContexts.generate()
    made.write(out / FOLDER)
    return made


def opened(config: RunConfig, own: Task | None, out: Path, client: bytes) -> dict[str, Any]:
    """Decrypt the record of a run in ``out``; the summary comes back."""
    decrypt_run(out, assemble(config, own), client)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return summary
