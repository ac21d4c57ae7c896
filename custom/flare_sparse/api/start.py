"""Start of a study in an environment: ``flare_sparse.run``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ..config.study import Study
from ..config.user_code import trust_code
from ..config.withdrawals import Withdrawals
from ..core.errors import ConfigError, suggest
from ..core.observer import SILENT, Observer
from ..results.runs.folder import RunFolder
from ..results.runs.progress import Printer
from .deployment import Env, check_service, run_in_flare
from .local import run as run_in_process
from .run import Run, complete_run

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
    start: str | Path | None = None,
    observer: Observer | None = None,
    kit: Path | None = None,
) -> Run:
    """Run a configuration, print a line for each round, and return the finished run.

    The same settings end with the same model in every environment, bit for bit.

    Args:
        config: YAML file.
        env: ``local``: this process, without FLARE; ``sim``: FLARE's simulator; ``poc``: server and sites as processes
            of their own; ``prod``: a running federation.
        overrides: settings by path.
        out: result folder; None: as ``flare-sparse run`` chooses it.
        start: ``"last"``: continue the interrupted run in ``out`` from its last committed round; ``"new"``:
            replace the run that ``out`` holds; or the result folder of a finished run, which is continued to a larger
            number of rounds.
        observer: hears of the rounds; None: they are printed. ``SILENT`` ignores them.
        kit: startup kit of an admin who may submit jobs; for ``prod``, which needs one.

    Raises:
        ConfigError: a wrong setting, or ``out`` holds a run that would be lost; nothing was started.
        FlareSparseError: the run failed; it can be resumed if a round was committed.

    Examples:
        >>> done = run("study.yaml", overrides={"method.rounds": 1}, out="short", observer=Observer())
        >>> done.summary["rounds"], sorted(done.summary["final"]["sites"])
        (1, ['A', 'B'])
    """
    study = Study.load(config, list_overrides(overrides))
    check_start(env, study, start, kit)
    folder = RunFolder.open(name_run(study, env), study, start, Path(out) if out else None)
    with folder.claim(0.0 if env == "local" else PATIENCE_S):
        prepared = folder.prepare(keeps_state=env != "prod", advise=lambda value: f'start="{value}"')
        return launch(env, study, prepared, Printer() if observer is None else observer, kit)


def check_start(env: str, study: Study, start: str | Path | None, kit: Path | None) -> None:
    """Refuse an unknown environment, and a startup kit, or a start, that does not fit it.

    Raises:
        ConfigError: there is no such environment; it needs a kit and has none, or the other way round; or a finished
            run of it leaves nothing that ``--start RUN`` could continue.
    """
    if env not in get_args(Env):
        raise ConfigError(f"env {env!r}: there is no such environment.{suggest(env, get_args(Env))} Choose local, sim, "
                          "poc or prod")  # fmt: skip
    if env == "prod" and kit is None:
        raise ConfigError("--env prod needs --kit: the startup kit of an admin who may submit jobs")
    if env != "prod" and kit is not None:
        raise ConfigError(f"--kit is for --env prod, not for --env {env}; leave it out")
    if env == "prod" and start not in (None, "last", "new"):
        raise ConfigError(
            f"--start {start} does not apply to --env prod, where the server deletes its checkpoints after a run. "
            f"Start a run of {study.config.method.config.rounds} rounds without --start"
        )


def launch(env: Env, study: Study, folder: RunFolder, observer: Observer = SILENT, kit: Path | None = None) -> Run:
    """Run a study in an environment and return the finished run.

    Args:
        env: name of the environment.
        study: the study.
        folder: its result folder, prepared.
        observer: hears of the rounds.
        kit: startup kit of an admin, for ``prod``.

    Raises:
        ConfigError: there is no such environment, or the study cannot run in it.
        FlareSparseError: the run failed.
    """
    check_start(env, study, None, kit)
    check_service(study.config.deployment.track, env, observer)
    trust_code(folder.path)
    # The settings of a result folder bring its list along: who has withdrawn from that run is not in this one either.
    Withdrawals.read(study.folder).inherit(folder.path)
    if env == "local":
        return run_in_process(study, folder, observer)
    run_in_flare(env, study, folder, observer, kit)
    return complete_run(study, folder)


def name_run(study: Study, env: str) -> str:
    """Return the name of the default result folder."""
    return f"{study.config.name}-local" if env == "local" else study.config.name


def list_overrides(overrides: Overrides) -> list[str]:
    """Return overrides as ``key.path=value`` with the value in YAML; those in a sequence are such texts already."""
    if isinstance(overrides, Mapping):
        return [f"{path}={json.dumps(value, default=str)}" for path, value in overrides.items()]
    return list(overrides)
