"""The data of every simulated site: phantoms, a folder for each site, or one data set partitioned into sites."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ..core.errors import ConfigError, DataError, suggest
from ..core.observer import SILENT, Observer
from ..tasks.data.partition import PARTITIONERS, list_renamed_sites
from ..tasks.data.phantom import write_phantoms
from ..tasks.data.site_folders import list_folders_without_examples
from ..tasks.task import SiteData, Task
from .schema import PhantomConfig, RunConfig, SimulatorConfig


def prepare_site_data(config: RunConfig, task: Task, folder: Path, observer: Observer = SILENT) -> dict[str, SiteData]:
    """Return the data of every simulated site, in name order.

    Args:
        config: configuration whose ``simulator`` section describes sites and data.
        task: reads the index of its data sets.
        folder: phantoms are written to ``folder/phantoms``; phantoms of the same settings are used again.
        observer: hears of sites that were renamed and folders without examples.

    Raises:
        ConfigError: the ``simulator`` section is missing or names settings for an unknown site.
        DataError: the data cannot be read or partitioned as described.
    """
    if config.simulator is None:
        raise ConfigError("simulator: missing; add a simulator section that describes the sites and their data")
    sites, settings = _locate_data(config.simulator, task, folder, observer), config.simulator.site_settings
    if unknown := sorted(set(settings) - set(sites)):
        raise ConfigError(
            f"simulator.site_settings: there is no site {unknown[0]!r}.{suggest(unknown[0], sites)} "
            f"The sites are {', '.join(sites)}"
        )
    return {name: replace(data, methods=settings.get(name, {})) for name, data in sites.items()}


def _locate_data(simulator: SimulatorConfig, task: Task, folder: Path, observer: Observer) -> dict[str, SiteData]:
    data, count = simulator.data, simulator.sites
    if data.has_path_per_site:
        names = [f"site-{i}" for i in range(1, (count or 0) + 1)]
        return {name: SiteData(name, Path(str(data.path).replace("{site}", name))) for name in sorted(names)}
    if data.path is not None and data.partition is not None and data.partition.name == "shared":
        return {name: SiteData(name, data.path) for name in sorted(f"site-{i}" for i in range(1, (count or 0) + 1))}
    if data.path is None or data.partition is None:
        path, kind, settings = _prepare_phantoms(simulator, folder / "phantoms"), "natural", {}
    else:
        path, kind, settings = data.path, data.partition.name, data.partition.config.model_dump()
    cohort = task.cohort(path)
    if not cohort.ids:
        raise DataError(f"{path}: there are no examples to partition into sites; expected at least one")
    if folders := list_folders_without_examples(path, cohort):
        observer.warn(
            f"{path}: {', '.join(folders)}: no examples found, so that this data is at no site of the run; mount or "
            "fill the folder, or remove it"
        )
    try:
        ids = PARTITIONERS[kind](cohort, count, **settings)
        renamed = list_renamed_sites(cohort, settings.get("column", "site")) if kind == "natural" else {}
    # The partitioners know columns and counts, but not the file that they came from.
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if renamed:
        pairs = ", ".join(f"{name} -> {flare_name}" for name, flare_name in sorted(renamed.items()))
        observer.note(f"sites renamed, because FLARE accepts only letters A to Z, digits, - and _: {pairs}")
    return {name: SiteData(name, path, ids[name]) for name in sorted(ids)}


def _prepare_phantoms(simulator: SimulatorConfig, folder: Path) -> Path:
    """Return the folder of the phantoms that the configuration describes; write them unless it exists."""
    phantom = simulator.data.phantom or PhantomConfig()
    sites = simulator.sites or 1
    path = folder / f"{sites}x{phantom.subjects}-{phantom.seed}{'-labels' if phantom.labels else ''}"
    if not path.is_dir():
        # Written beside and renamed: an interrupted command must not leave a folder that looks complete.
        unfinished = path.with_name(f"{path.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_phantoms(unfinished, sites, phantom.subjects, phantom.seed, labels=phantom.labels).rename(path)
    return path
