"""The data of every simulated site: phantoms, a folder for each site, or one data set partitioned into sites."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import ConfigError, DataError, list_first, suggest
from ..core.names import list_similar
from ..core.observer import SILENT, Observer
from ..tasks.data.partition import PARTITIONERS, Partition, list_renamed_sites
from ..tasks.data.phantom import write_phantoms
from ..tasks.data.site_folders import list_folders_without_examples
from ..tasks.task import Cohort, SiteData, Task
from .schema import PhantomConfig, RunConfig, SimulatorConfig
from .withdrawals import Withdrawals


def prepare_site_data(config: RunConfig, task: Task, folder: Path, observer: Observer = SILENT) -> dict[str, SiteData]:
    """Return the data of every simulated site, in name order, without what has withdrawn from the run in ``folder``.

    Args:
        config: configuration whose ``simulator`` section describes sites and data.
        task: reads the index of its data sets.
        folder: phantoms are written to ``folder/phantoms``; phantoms of the same settings are used again.
        observer: hears of sites that were renamed, folders without examples, and GPUs of sites.

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
    gone = Withdrawals.read(folder)
    devices = spread_sites(list(sites))
    if devices and config.method.config.training.device == "auto":
        observer.note(f"GPUs: {', '.join(f'{name} on {device}' for name, device in devices.items())}")
    return {
        name: replace(gone.open(data), methods=settings.get(name, {}), device=devices.get(name))
        for name, data in sites.items()
        if name not in gone.sites
    }


def spread_sites(names: Sequence[str]) -> dict[str, str]:
    """Return the GPU of each simulated site, in turn; empty where there are not several GPUs."""
    count = torch.cuda.device_count()
    return {name: f"cuda:{number % count}" for number, name in enumerate(names)} if count > 1 else {}


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
        # Where the data names the sites, a subject may have been at several.
        divide = PARTITIONERS[kind] if kind == "natural" or not cohort.subjects else partial(_divide_subjects, kind)
        ids = divide(cohort, count, **settings)
        naming = {key: settings[key] for key in ("column", "missing") if key in settings}
        renamed = list_renamed_sites(cohort, **naming) if kind == "natural" else {}
    # The partitioners know columns and counts, but not the file that they came from.
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    if renamed:
        pairs = ", ".join(f"{name} -> {flare_name}" for name, flare_name in sorted(renamed.items()))
        observer.note(f"sites renamed, because FLARE accepts only letters A to Z, digits, - and _: {pairs}")
    if similar := list_similar(ids):
        groups = "; ".join(list_first(group) for group in similar[:3])
        observer.warn(
            f"{path}: sites whose names differ only in spelling are different sites: {groups}; if not, correct them"
        )
    return {name: SiteData(name, path, ids[name]) for name in sorted(ids)}


def _divide_subjects(kind: str, cohort: Cohort, count: int | None, **settings: Any) -> Partition:
    """Return a partition in which all examples of a subject are at one site, by the columns of its first example."""
    first = {subject: row for row, subject in reversed(list(enumerate(cohort.subjects)))}
    rows = sorted(first.values())
    columns = {name: np.asarray(values)[rows] for name, values in cohort.columns.items()}
    parts = PARTITIONERS[kind](Cohort(tuple(cohort.subjects[row] for row in rows), columns), count, **settings)
    site_of = {subject: site for site, subjects in parts.items() for subject in subjects}
    return {
        site: tuple(name for name, own in zip(cohort.ids, cohort.subjects, strict=True) if site_of.get(own) == site)
        for site in parts
    }


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
