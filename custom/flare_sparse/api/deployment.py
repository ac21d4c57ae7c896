"""A study as a FLARE job, and its run in FLARE's simulator, in a POC federation, or in a running one."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import Service
    from ..config.study import Study
    from ..core.observer import Observer
    from ..flare.recipe import SparseRecipe
    from ..results.runs.folder import RunFolder

Env = Literal["local", "sim", "poc", "prod"]


def build_recipe(study: Study, out: Path) -> SparseRecipe:
    """Return the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe
    from ..flare.tracking import Tracker

    config = study.config
    if study.user_code:
        config = config.model_copy(update={"deployment": config.deployment.model_copy(update={"packaging": "byoc"})})
    tracker = None
    if (service := config.deployment.track) is not None:
        tags = {"method": config.method.name, "task": config.task.name, "seed": str(config.seed)}
        tracker = Tracker(service, config.name, out.resolve().name, tags)
    return SparseRecipe(config, modules=study.user_code, tracker=tracker)


def run_in_flare(env: Env, study: Study, folder: RunFolder, observer: Observer, kit: Path | None) -> None:
    """Run the job of a study, and collect its record in the result folder.

    In a running federation each site reads its own data, and with ``folder.resume`` the job that was last submitted
    from the folder is waited for if the server still runs it.

    Raises:
        ConfigError: the folder's path contains a space, the federation cannot be started, or the kit cannot log in.
        JobFailed: the job was refused, or ended without a result.
    """
    # FLARE takes seconds to import; a local run must not wait for it.
    from ..flare.launch.poc import start_poc
    from ..flare.launch.simulator import Workplace, resolve_folder, simulate
    from ..flare.launch.submission import run_deployed
    from ..flare.recipe import list_user_classes
    from ..flare.workspace import write_kits
    from ..tasks.data.source import write_site_files

    config, out = study.config, resolve_folder(folder.path) if kit is None else folder.path
    start = f"{config.name}: {config.method.name}, {config.method.config.rounds} rounds"
    recipe, resume = build_recipe(study, out), folder.resume
    if kit is not None:
        observer.say(f"{start}, submitted with {kit}")
        run_deployed(recipe, kit.resolve(), out, observer=observer, resume=resume, before_submission=folder.clear)
        return
    checkpoints = folder.open_checkpoints(study)
    with observer.wait("preparing the sites' data ..."):
        sites = study.prepare_sites(out, observer)
    classes = list_user_classes(config)
    if env == "poc":
        observer.say(f"{start}, {len(sites)} sites as separate processes (nvflare poc, mTLS)")
        with start_poc(out / "poc", sites, checkpoints, classes) as admin:
            folder.clear()
            run_deployed(recipe, admin, out, observer=observer)
        return
    site_files = write_site_files(out / "sites", sites.values())
    observer.say(f"{start}, {len(sites)} sites in FLARE's simulator")
    kits = write_kits(out / "kits", config.stage.generate_kits(sites))
    folder.clear()
    workplace = Workplace(sorted(sites), site_files, classes, checkpoints=checkpoints, kits=kits)
    simulate(recipe, workplace, out, observer)


def check_service(service: Service | None, env: str, observer: Observer) -> None:
    """Refuse a tracking service whose package is missing, and say where one receives nothing.

    Raises:
        ConfigError: the service's package is missing where it runs.
    """
    if service is None:
        return
    if env == "local":
        observer.note("deployment.track: a local run has no FLARE server that could send figures; --env sim has one")
    elif env != "prod" and find_spec(service) is None:
        raise ConfigError(f"deployment.track: {service} needs its package: pip install 'flare-sparse[track]'")
