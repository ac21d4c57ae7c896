"""Where each simulated site's data lies: phantoms, one place a site, or one data set cut into sites."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from ..config import RunConfig
from ..config.schema import PhantomConfig, SimulatorConfig
from ..data.partition import PARTITIONERS
from ..data.phantom import write_phantoms
from ..errors import ConfigError, suggest
from ..task import SiteData, Task


def simulated_sites(config: RunConfig, task: Task, folder: Path) -> dict[str, SiteData]:
    """The data of every site, in name order.

    Args:
        config: its ``simulator`` section says what to do.
        task: knows the index of its data sets.
        folder: phantoms go to ``folder/phantoms``; those of an earlier run with the same settings are used again.

    Raises:
        ConfigError: there is no ``simulator`` section.
        DataError: the data cannot be read, or cannot be cut like this.
    """
    if config.simulator is None:
        raise ConfigError("simulator: missing; the simulator must be told its sites and their data")
    sites, choices = _sites(config.simulator, task, folder), config.simulator.site_settings
    if unknown := sorted(set(choices) - set(sites)):
        raise ConfigError(
            f"simulator.site_settings: no site {unknown[0]!r}.{suggest(unknown[0], sites)} {', '.join(sites)}"
        )
    return {name: replace(data, methods=choices.get(name, {})) for name, data in sites.items()}


def _sites(simulator: SimulatorConfig, task: Task, folder: Path) -> dict[str, SiteData]:
    data, count = simulator.data, simulator.sites
    if data.one_place_a_site:
        names = [f"site-{i}" for i in range(1, (count or 0) + 1)]
        return {name: SiteData(name, Path(str(data.path).replace("{site}", name))) for name in sorted(names)}
    if data.path is None or data.partition is None:
        path, kind, settings = _phantoms(simulator, folder / "phantoms"), "natural", {}
    else:
        path, kind, settings = data.path, data.partition.name, data.partition.config.model_dump()
    ids = PARTITIONERS[kind](task.cohort(path), count, **settings)
    return {name: SiteData(name, path, ids[name]) for name in sorted(ids)}


def _phantoms(simulator: SimulatorConfig, folder: Path) -> Path:
    """The phantoms that the configuration describes, made unless they are there."""
    wanted = simulator.data.phantom or PhantomConfig()
    sites = simulator.sites or 1
    path = folder / f"{sites}x{wanted.subjects}-{wanted.seed}"
    if not path.is_dir():
        unfinished = path.with_name(f"{path.name}.part")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_phantoms(unfinished, sites, wanted.subjects, wanted.seed).rename(path)
    return path
