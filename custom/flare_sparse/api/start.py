"""Start of a study in an environment: ``flare_sparse.run``."""

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ..config.study import Study
from ..config.user_code import trust_code
from ..config.withdrawals import Withdrawals
from ..core.errors import ConfigError, suggest
from ..core.observer import Observer
from ..results.runs.folder import RunFolder
from ..results.runs.progress import Printer
from .deployment import UNSPECIFIED, Deployment, Env
from .run import Run

Overrides = Sequence[str] | Mapping[str, Any]
"""``["method.sparsity=0.9"]`` or ``{"method.sparsity": 0.9}``."""

PATIENCE_S = 10.0
"""Seconds to wait for the processes of a killed command: those of FLARE's simulator end within two."""


def run(
    config: str | Path,
    env: Env = "local",
    overrides: Overrides = (),
    *,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    observer: Observer | None = None,
    deployment: Deployment = UNSPECIFIED,
) -> Run:
    """Run a configuration, print a line for each round, and return the finished run.

    The same settings end with the same model in every environment, bit for bit.

    Args:
        config: YAML file.
        env: ``local``: this process, without FLARE; ``sim``: FLARE's simulator; ``poc``: server and sites as processes
            of their own; ``prod``: a running federation.
        overrides: settings by path.
        out: result folder; None: as ``flare-sparse run`` chooses it.
        resume: continue an interrupted run in ``out`` from its last committed round.
        overwrite: replace the run that ``out`` holds.
        observer: hears of the rounds; None: they are printed. ``SILENT`` ignores them.
        deployment: startup kit and packaging; only for FLARE's environments.

    Raises:
        ConfigError: a wrong setting, or ``out`` holds a run that would be lost; nothing was started.
        FlareSparseError: the run failed; it can be resumed if a round was committed.

    Examples:
        >>> done = run("study.yaml", overrides={"method.rounds": 1}, out="short", observer=Observer())
        >>> done.summary["rounds"], sorted(done.summary["final"]["sites"])
        (1, ['A', 'B'])
    """
    study = Study.load(config, list_overrides(overrides))
    name = name_run(study, env)
    folder = RunFolder(Path(out), resume) if out else RunFolder.choose(name, resume=resume, overwrite=overwrite)
    with folder.claim(0.0 if env == "local" else PATIENCE_S):
        prepared = folder.prepare(
            overwrite=overwrite, keeps_state=env != "prod", advise=lambda flag: f"{flag.removeprefix('--')}=True"
        )
        return launch(env, study, prepared, Printer() if observer is None else observer, deployment)


def launch(env: str, study: Study, folder: RunFolder, observer: Observer, deployment: Deployment = UNSPECIFIED) -> Run:
    """Run a study in an environment and return the finished run.

    Args:
        env: name of the environment, a module of this package.
        study: the study.
        folder: its result folder, prepared.
        observer: hears of the rounds.
        deployment: startup kit and packaging.

    Raises:
        ConfigError: there is no such environment, or the study cannot run in it.
        FlareSparseError: the run failed.
    """
    if env not in get_args(Env):
        raise ConfigError(f"env {env!r}: there is no such environment.{suggest(env, get_args(Env))} Choose local, sim, "
                          "poc or prod")  # fmt: skip
    trust_code(folder.path)
    # The settings of a result folder bring its list along: who has withdrawn from that run is not in this one either.
    Withdrawals.read(study.folder).inherit(folder.path)
    # Imported by name: a local run needs nothing of FLARE.
    environment = importlib.import_module(f".{env}", __package__)
    result: Run = environment.run(study, folder, observer, deployment)
    return result


def name_run(study: Study, env: str) -> str:
    """Return the name of the default result folder."""
    return f"{study.config.name}-local" if env == "local" else study.config.name


def list_overrides(overrides: Overrides) -> list[str]:
    """Return overrides as ``key.path=value`` with the value in YAML; those in a sequence are such texts already."""
    if isinstance(overrides, Mapping):
        return [f"{path}={json.dumps(value, default=str)}" for path, value in overrides.items()]
    return list(overrides)
