"""CKKS keys of an encrypted trial run on one machine: the folder ``he`` holds the keys of server and sites."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ..config.assemble import assemble
from ..config.schema import RunConfig
from ..privacy.encryption import KeyContexts
from ..results.runs.decrypt import decrypt_run
from ..results.runs.folder import SUMMARY
from ..tasks.task import Task

FOLDER = "he"


def prepare_key_contexts(config: RunConfig, out: Path, *, resume: bool) -> KeyContexts | None:
    """Return new key contexts, or those of the resumed run; None when the run is not encrypted.

    Raises:
        ConfigError: TenSEAL is not installed, or the key contexts of a resumed run are missing.
    """
    if not resume:
        shutil.rmtree(out / FOLDER, ignore_errors=True)
    if not config.encrypted:
        return None
    # The checkpoints of an encrypted run hold ciphertexts: only the keys that wrote them can read them.
    if resume:
        return KeyContexts.read(out / FOLDER)
    contexts = KeyContexts.generate()
    contexts.write(out / FOLDER)
    return contexts


def decrypt_record(config: RunConfig, user_task: Task | None, out: Path, client_context: bytes) -> dict[str, Any]:
    """Decrypt the models of the run in ``out`` and return its summary.

    Args:
        config: configuration of the run.
        user_task: the task, when it is a user task.
        out: result folder.
        client_context: serialized key context of a site.
    """
    decrypt_run(out, assemble(config, user_task), client_context)
    summary: dict[str, Any] = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
    return summary
