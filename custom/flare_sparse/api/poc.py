"""The environment ``poc``: FLARE provisions and starts a server and sites as separate processes on this machine."""

from ..config.study import Study
from ..core.observer import SILENT, Observer
from ..results.runs.folder import RunFolder
from .deployment import build_recipe, describe_start
from .run import Run, complete_run


def run(study: Study, folder: RunFolder, observer: Observer = SILENT) -> Run:
    """Run a study in a POC federation and write its record.

    Raises:
        ConfigError: the federation cannot be started.
        JobFailed: the job ended without a result.
    """
    from ..flare.launch.poc import start_poc
    from ..flare.launch.submission import run_deployed
    from ..flare.recipe import list_user_classes

    out = folder.path
    checkpoints = folder.open_checkpoints(study)
    with observer.wait("preparing the sites' data ..."):
        sites = study.prepare_sites(out, observer)
    observer.say(describe_start(study, f"{len(sites)} sites as separate processes (nvflare poc, mTLS)"))
    also, recipe = list_user_classes(study.config), build_recipe(study, out)
    with start_poc(out / "poc", sites, checkpoints, also) as kit:
        folder.clear()
        run_deployed(recipe, kit, out, on_line=observer.say)
    return complete_run(study, folder)
