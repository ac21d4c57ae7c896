"""Files of the startup kit; in the simulator, which has none, of a folder."""

import os
from collections.abc import Mapping
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

KITS_VARIABLE = "FLARE_SPARSE_KITS"
"""Folder of the files in the simulator; ignored in a secure federation."""


def read_kit(fl_ctx: FLContext, file: str) -> bytes:
    """Return the content of a file of this participant's startup kit.

    Raises:
        OSError: it cannot be read.
    """
    return (_find_folder(fl_ctx) / file).read_bytes()


def write_kits(folder: Path, kits: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write the files of simulated participants, by name, readable by their owner only, and return the folder."""
    for name, files in kits.items():
        for file, content in files.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            # Created with its mode before the content is written: at no time can others read the key.
            path.touch(mode=0o600)
            path.write_bytes(content)
    return folder


def _find_folder(fl_ctx: FLContext) -> Path:
    folder = os.environ.get(KITS_VARIABLE)
    # The variable counts only outside secure mode: otherwise an environment could replace certificates.
    if folder and not fl_ctx.get_prop(FLContextKey.SECURE_MODE, True):
        site = Path(folder) / fl_ctx.get_identity_name()
        return site if site.is_dir() else Path(folder)
    workspace: Workspace = fl_ctx.get_engine().get_workspace()
    return Path(workspace.get_startup_kit_dir())
