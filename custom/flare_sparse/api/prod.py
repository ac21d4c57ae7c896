"""The environment ``prod``: a running federation, to which an admin submits the job."""

from pathlib import Path

from ..config.study import Study
from ..core.errors import ConfigError
from ..core.observer import SILENT, Observer
from ..results.runs.folder import RunFolder
from .deployment import build_recipe, describe_start
from .run import Run, complete_run


def run(
    study: Study,
    folder: RunFolder,
    observer: Observer = SILENT,
    *,
    kit: Path | None = None,
) -> Run:
    """Submit the job to a running federation and wait for its result; each site reads its own data.

    With ``folder.resume`` the job that was last submitted from the folder is waited for if the server still runs it.

    Args:
        study: the study.
        folder: its result folder, prepared.
        observer: hears of the rounds.
        kit: startup kit of an admin who may submit jobs.

    Raises:
        ConfigError: there is no startup kit of an admin, or the login at the server failed.
        JobFailed: the job was refused, or ended without a result.
    """
    from ..flare.launch.submission import run_deployed

    if kit is None:
        raise ConfigError("--env prod needs --kit: the startup kit of an admin who may submit jobs")
    observer.say(describe_start(study, f"submitted with {kit}"))
    run_deployed(
        build_recipe(study, folder.path),
        kit.resolve(),
        folder.path,
        on_line=observer.say,
        resume=folder.resume,
        before_submission=folder.clear,
    )
    return complete_run(study, folder)
