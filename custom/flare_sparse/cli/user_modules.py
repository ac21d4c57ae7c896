"""The user's own code in a result folder, from which a finished model can be loaded later."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ..config.user_tasks import CODE_FOLDER


def copy_user_code(code: Sequence[Path], out: Path) -> None:
    """Copy the user's files and packages into the folder ``code`` of a result folder; do nothing if there are none."""
    for source in code:
        target = out / CODE_FOLDER / source.name
        if source.resolve() == target.resolve():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        else:
            shutil.copy2(source, target)
