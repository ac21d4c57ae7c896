"""A job's files in the workspace of a participant of FLARE."""

from pathlib import Path

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
