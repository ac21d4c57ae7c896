"""A job's files in the workspace of a participant of FLARE, and those of its startup kit."""

import os
from collections.abc import Mapping
from pathlib import Path

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from ..core.errors import format_site_error

JOB_FILE = "flare_sparse.yaml"
"""The job's settings among a participant's files of it."""


def get_workspace(fl_ctx: FLContext) -> Workspace:
    """Return the workspace of this process."""
    workspace: Workspace = fl_ctx.get_engine().get_workspace()
    return workspace


def find_job_file(fl_ctx: FLContext) -> Path:
    """Return the file of the job's settings at this participant; there may be none."""
    folder = Path(get_workspace(fl_ctx).get_app_config_dir(fl_ctx.get_job_id()))
    # Kits of nvflare package name no configuration folder: FLARE then searches the app, whose folder is always config.
    return folder / JOB_FILE if (folder / JOB_FILE).is_file() else folder / "config" / JOB_FILE


def write_site_error(error: Exception, code: str, fl_ctx: FLContext) -> None:
    """Write an error to ``site_error.txt`` in the job's folder at this site.

    The text may name subjects and files, so it must not go to a log: FLARE streams logs to the server.
    """
    report = Path(get_workspace(fl_ctx).get_run_dir(fl_ctx.get_job_id())) / "site_error.txt"
    # The owner's alone, before the text is in it: it may name subjects.
    report.touch(mode=0o600)
    report.chmod(0o600)
    report.write_text(format_site_error(error, code))


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
    return Path(get_workspace(fl_ctx).get_startup_kit_dir())
