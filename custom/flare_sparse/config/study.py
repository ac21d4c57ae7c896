"""A study: a configuration and what belongs to it, built once and passed whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path

from ..core.checkpoint.store import Store
from ..core.findings import Finding
from ..core.observer import SILENT, Observer
from ..tasks.task import SiteData, Task
from .assemble import Assembly, assemble, open_checkpoints
from .configurations import find_configuration
from .loading import load_config
from .schema import RunConfig
from .sites import prepare_site_data
from .user_tasks import list_user_code, load_task


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
        """Return the data of every simulated site; see :func:`flare_sparse.config.sites.prepare_site_data`."""
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
