"""A study: a configuration and what belongs to it, built once and passed whole.

The data of every simulated site: phantoms, a folder for each site, or one data set partitioned into sites.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path

import torch

from ..core.checkpoint.store import Store
from ..core.errors import ConfigError, DataError, list_first, suggest
from ..core.findings import Finding
from ..core.names import list_similar
from ..core.observer import SILENT, Observer
from ..tasks.data.partition import (
    NaturalPartition,
    Partitioner,
    SharedPartition,
    find_renamed_sites,
    list_folders_without_examples,
    partition_cohort,
)
from ..tasks.data.phantom import write_phantoms
from ..tasks.task import SiteData, Task
from .assemble import Assembly, assemble, open_checkpoints
from .loading import load_config
from .schema import PhantomConfig, RunConfig, SimulatorConfig
from .user_classes import list_user_code, load_task
from .withdrawals import Withdrawals
from .yaml_files import find_configuration


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
    partition = data.partition.config if data.partition else None
    if data.has_path_per_site or isinstance(partition, SharedPartition):
        names = sorted(f"site-{i}" for i in range(1, (count or 0) + 1))
        return {name: SiteData(name, Path(str(data.path).replace("{site}", name))) for name in names}
    if data.path is None or not isinstance(partition, Partitioner):
        path, partition = _prepare_phantoms(simulator, folder / "phantoms"), NaturalPartition()
    else:
        path = data.path
    cohort = task.cohort(path)
    if not cohort.ids:
        raise DataError(f"{path}: there are no examples to partition into sites; expected at least one")
    if folders := list_folders_without_examples(path, cohort):
        observer.warn(
            f"{path}: {', '.join(folders)}: no examples found, so that this data is at no site of the run; mount or "
            "fill the folder, or remove it"
        )
    try:
        ids = partition_cohort(partition, cohort, count)
        renamed = {}
        if isinstance(partition, NaturalPartition):
            renamed = find_renamed_sites(cohort, partition.column, partition.missing)
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


@dataclass(frozen=True)
class Study:
    """Settings, the folder that they came from, and what follows from both: task, method, run id, user code.

    Attributes:
        config: validated settings.
        file: where they were read from; the user's own modules lie beside it.

    Examples:
        >>> study = Study.load("study.yaml", ["method.sparsity=0.75"])
        >>> study.config.method.name, study.config.method.config.sparsity
        ('neurosfl', 0.75)
    """

    config: RunConfig
    file: Path

    @classmethod
    def load(cls, file: str | Path, overrides: Sequence[str] = ()) -> Study:
        """Load a file, or by its name a configuration of this package; see ``flare_sparse.config.loading.load_config``.

        Raises:
            ConfigError: the text lists every error with the field's path, the value found and the values allowed.
        """
        file = find_configuration(Path(file))
        return cls(load_config(file, overrides), file)

    @property
    def folder(self) -> Path:
        """Folder of the configuration."""
        return self.file.parent

    @cached_property
    def assembly(self) -> Assembly:
        """Task, method, initial weights and run id.

        Raises:
            ConfigError: the task or the model cannot be built from the settings.
        """
        return assemble(self.config, self.load_task())

    @property
    def run_id(self) -> str:
        """Name of the run, 16 hex digits: equal for equal settings and models."""
        return self.assembly.run_id

    @cached_property
    def user_code(self) -> tuple[Path, ...]:
        """The user's files and packages that the job needs; empty for a task of this package.

        Raises:
            ConfigError: the task or the script is not found.
        """
        return list_user_code(self.config, self.folder)

    def load_task(self) -> Task:
        """Return a new task, which shares nothing with that of ``assembly``.

        Raises:
            ConfigError: the user's task or network cannot be imported or built.
        """
        return load_task(self.config, self.folder)

    def prepare_sites(self, folder: Path, observer: Observer = SILENT) -> dict[str, SiteData]:
        """Return the data of every simulated site; see :func:`flare_sparse.config.study.prepare_site_data`."""
        return prepare_site_data(self.config, self.assembly.task, folder, observer)

    def check(self, *, site_policy: Path | None = None) -> Iterator[Finding]:
        """Yield what ``flare-sparse check`` prints: settings, model, data, and one short round at the simulated sites.

        Without a FAIL, a run of one round ends with a contribution of every site. Nothing leaves this machine.

        Args:
            site_policy: check the job against a site's policy, too: a file, or one of open, careful, strict.

        Examples:
            >>> findings = list(Study.load("study.yaml").check())
            >>> [finding.place for finding in findings if finding.severity == "FAIL"]
            []
        """
        # By name: a check is built of the rooms above this one.
        findings: Iterator[Finding] = import_module("flare_sparse.api.check").check_study(self, site_policy)
        return findings

    def open_checkpoints(self, root: Path, end: str) -> Store:
        """Return the checkpoints of one end, ``"server"`` or a site's name, below ``root``."""
        return open_checkpoints(self.config.job, self.assembly, root, end)
