"""``flare-sparse run``: run a configuration from its data to its record, in one of four environments."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from ..api.deployment import Deployment, Env, Service, check_service
from ..core.errors import ConfigError
from ..core.threads import run_beside
from ..results.runs.progress import find_training
from .console import PageConsole
from .console import out as stdout
from .options import JSON, ConfigFile, ContinueFrom, Overrides, Resume, StepBack, take_options
from .screen import Screen

if TYPE_CHECKING:
    from ..config.study import Study
    from .outcome import RunProgress


@dataclass(frozen=True)
class RunOptions:
    """Options of ``flare-sparse run``."""

    config: ConfigFile
    env: Annotated[
        Env,
        typer.Option(
            help="Where to run: local (this process, without FLARE), sim (FLARE's simulator, one process per site), "
            "poc (server and sites as separate processes on this machine, over mTLS) or prod (a running federation, "
            "see --kit)"
        ),
    ] = "sim"
    kit: Annotated[
        Path | None, typer.Option(help="Startup kit of an admin who may submit jobs; only with --env prod")
    ] = None
    byoc: Annotated[
        bool, typer.Option("--byoc", help="Send the package's source with the job; only with --env prod")
    ] = False
    out: Annotated[
        Path | None,
        typer.Option(
            help="Result folder; default: runs/<name>, with --env local runs/<name>-local; with -2, -3, ... if that "
            "holds a finished run"
        ),
    ] = None
    resume: Resume = False
    step_back: StepBack = None
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the finished or interrupted run that the result folder holds")
    ] = False
    continue_from: ContinueFrom = None
    track: Annotated[
        Service | None,
        typer.Option(
            help="Send the figures of every round to this service through FLARE's receiver at the server, whose "
            "environment has address and key; without these they are files in the result folder. Needs the extra track"
        ),
    ] = None
    set_: Overrides = None


@take_options(RunOptions)
def run(options: RunOptions) -> None:
    """Run a job, show a line for each round, and write model and record to the result folder.

    The same settings end with the same model in every environment, bit for bit. Unless --env is given, the job runs in
    FLARE's simulator. Ctrl-C stops the run after its last committed round and prints the command that continues it.

    With --json, standard output has the line of each round as in rounds.jsonl, then the summary, with the folder.

    Exit codes: 0: finished, every site contributed to at least one round. 3: finished, but a site contributed to no
    round; the last lines name it and the reason. 1: failed. 2: wrong configuration or option, nothing was started.
    130: stopped by Ctrl-C.

    Examples:

        flare-sparse run app_configs/neurosfl_brain_age.yaml

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env local --set method.rounds=2

        flare-sparse run app_configs/neurosfl_brain_age.yaml --set method.sparsity=0.98 --out runs/p98

        flare-sparse run app_configs/neurosfl_brain_age.yaml --resume

        flare-sparse run app_configs/neurosfl_brain_age.yaml --resume --step-back 1

        flare-sparse run fedavg_brain_age --set method.rounds=30 --continue-from runs/fedavg_brain_age

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env prod --kit kits/lead@coordination.org
    """
    from ..api.start import PATIENCE_S, launch, name_run
    from ..config.study import Study
    from ..results.runs.folder import RunFolder
    from .outcome import RunCommand, explain_outcome
    from .summary import PARTIAL, find_idle_sites, show_result

    _check_options(options)
    _check_step_back(options)
    env = options.env
    if options.track is not None:
        check_service(options.track, env)
    if options.continue_from is not None:
        _check_continuation(options)
    study = Study.load(options.config, options.set_ or ())
    name, restarts = name_run(study, env), env == "poc" and study.config.encrypted
    if options.continue_from is not None:
        _refuse_lost_state(study, env)
        chosen = RunFolder.continue_run(options.continue_from, study, options.out)
    elif options.out is not None:
        chosen = RunFolder(options.out, options.resume, options.step_back or 0)
    else:
        chosen = RunFolder.choose(name, resume=options.resume, overwrite=options.overwrite)
        chosen = replace(chosen, step_back=options.step_back or 0)
    typed = {key: getattr(options, key) for key in ("env", "kit", "byoc", "track")}
    command = RunCommand(options.config, chosen.path, typed, tuple(options.set_ or ()))
    # A killed simulation holds the lock until its processes notice that their command is gone.
    with chosen.claim(0.0 if env == "local" else PATIENCE_S):
        folder = chosen.prepare(overwrite=options.overwrite, keeps_state=env != "prod", advise=command.format)
        deployment = Deployment(options.kit, options.byoc, options.track, command.format() if env == "prod" else "")
        with open_screen(env) as console:
            if options.out is None and not JSON.get() and chosen.path.name != name and not chosen.resume:
                console.print(f"runs/{name} holds a finished run; this one is written to {chosen.path}")
            # FLARE makes new keys for every POC federation, so an encrypted run there starts again.
            with explain_outcome(command, env, restarts=restarts) as progress:
                screen = RunScreen(console, progress, as_json=JSON.get())
                with show_training(console, folder.path, progress):
                    finished = launch(env, study, folder, screen, deployment)
            if JSON.get():
                console.print(json.dumps({"folder": str(folder.path), **finished.summary}), markup=False)
            else:
                show_result(console, finished.summary, folder.path)
    if find_idle_sites(finished.summary):
        raise typer.Exit(PARTIAL)


@contextmanager
def show_training(console: Console, folder: Path, progress: RunProgress) -> Iterator[None]:
    """Show on a terminal how far each site is within the round, while the block runs."""
    if not console.is_terminal:
        yield
        return

    def show(has_ended: threading.Event) -> None:
        status: Status | None = None
        while not has_ended.wait(1):
            texts = find_training(folder, progress.committed or 0)
            if status is None and texts:
                status = console.status("")
                status.start()
            if status is not None:
                status.update(escape("; ".join(texts)))
        if status is not None:
            status.stop()

    with run_beside(show):
        yield


class RunScreen(Screen):
    """The screen of a run, which notes the committed rounds.

    Args:
        console: receives the lines.
        progress: notes the rounds.
        as_json: print the line of each round as it stands in ``rounds.jsonl``, and nothing else.
    """

    def __init__(self, console: Console, progress: RunProgress, *, as_json: bool = False):
        super().__init__(console)
        self._progress, self._as_json = progress, as_json

    def say(self, text: str) -> None:
        self._progress.record(text)
        if not self._as_json:
            super().say(text)

    def see_round(self, line: dict[str, Any]) -> None:
        self._progress.record(line)
        if self._as_json:
            self._console.print(json.dumps(line), markup=False)
        else:
            super().see_round(line)


@contextmanager
def open_screen(env: Env) -> Iterator[Console]:
    """Yield a console that reaches the screen while FLARE's output goes to a log file."""
    if env == "local":
        yield stdout
        return
    # FLARE's simulator prints to this process's own standard output, which is sent to a log file meanwhile
    # (flare/launch/simulator.py); the duplicate still reaches the screen.
    with os.fdopen(os.dup(1), "w") as screen:
        yield PageConsole(file=screen, highlight=False, soft_wrap=True)


def _check_options(options: RunOptions) -> None:
    """Refuse options that do not apply to the environment.

    Raises:
        ConfigError: an option does not apply to the environment.
    """
    if options.resume and options.overwrite:
        raise ConfigError("--resume continues the run in --out, --overwrite replaces it; leave one of them out")
    if options.env == "prod":
        if options.kit is None:
            raise ConfigError("--env prod needs --kit: the startup kit of an admin who may submit jobs")
    elif options.kit is not None or options.byoc:
        option = "--kit" if options.kit else "--byoc"
        raise ConfigError(f"{option} is for --env prod, not for --env {options.env}; leave it out")


def _check_continuation(options: RunOptions) -> None:
    """Refuse --continue-from beside options that it does not apply to.

    Raises:
        ConfigError: --continue-from does not apply to the other options.
    """
    if options.overwrite:
        raise ConfigError("--continue-from replaces no run; leave --overwrite out and choose a new --out")
    if options.resume:
        raise ConfigError(
            "--resume and --continue-from exclude each other: --continue-from starts a longer run from a finished one, "
            "--resume goes on with that longer run after an interruption"
        )


def _refuse_lost_state(study: Study, env: str) -> None:
    """Refuse to continue a finished run of an environment that keeps no state.

    Raises:
        ConfigError: a finished run of this environment leaves nothing that --continue-from could start from.
    """
    if env == "prod" or (env == "poc" and study.config.encrypted):
        reason = "the server deletes its checkpoints" if env == "prod" else "every federation has new keys"
        raise ConfigError(
            f"--continue-from does not apply to --env {env}, where {reason} after a run. Start a run of "
            f"{study.config.method.config.rounds} rounds without --continue-from"
        )


def _check_step_back(options: RunOptions) -> None:
    """Refuse --step-back where it does not apply.

    Raises:
        ConfigError: --step-back does not apply to the environment or to the other options.
    """
    if options.step_back is None:
        return
    if options.env == "prod":
        raise ConfigError(
            "--step-back does not apply to --env prod, where the checkpoints lie at the server: abort the job, rename "
            'the server\'s newest checkpoint (docs/reliability.md, "Malicious sites") and submit it again'
        )
    if options.continue_from is not None or not options.resume:
        reason = " and not for --continue-from" if options.continue_from is not None else "; add --resume"
        raise ConfigError(f"--step-back discards commits of an interrupted run: it is for --resume{reason}")
