"""The environment ``sim``: a study runs in FLARE's simulator, with a process for each site."""

from ..config.study import Study
from ..core.observer import SILENT, Observer
from ..results.runs.folder import RunFolder
from ..tasks.data.source import write_site_files
from .deployment import build_recipe, describe_start
from .run import Run, complete_run


def run(study: Study, folder: RunFolder, observer: Observer = SILENT) -> Run:
    """Prepare the sites' data, run the job in FLARE's simulator and write its record.

    Raises:
        ConfigError: the path of the folder contains a space.
        JobFailed: the job ended without a result.
    """
    # FLARE takes seconds to import; a local run must not wait for it.
    from ..flare.kits import write_kits
    from ..flare.launch.simulator import Workplace, resolve_folder, simulate
    from ..flare.recipe import list_user_classes

    out, config = resolve_folder(folder.path), study.config
    checkpoints = folder.open_checkpoints(study)
    with observer.wait("preparing the sites' data ..."):
        sites = study.prepare_sites(out, observer)
    site_files = write_site_files(out / "sites", sites.values())
    observer.say(describe_start(study, f"{len(sites)} sites in FLARE's simulator"))
    kits = out / "kits" if config.is_masked else None
    if kits:
        write_kits(kits, sites)
    recipe = build_recipe(study, out)
    folder.clear()
    workplace = Workplace(list_user_classes(config), checkpoints=checkpoints, kits=kits)
    simulate(recipe, sorted(sites), site_files, out, workplace, observer)
    return complete_run(study, folder)
