"""``flare-sparse run``: run a configuration from its data to its record, in one of four environments."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from ..api.deployment import Env
from ..core.threads import run_beside
from ..results.runs.progress import find_training
from .console import JSON, LastingConsole, Screen, err
from .options import AdminKit, ConfigFile, Out, Overrides

if TYPE_CHECKING:
    from .outcome import RunProgress


def run(
    config: ConfigFile,
    env: Annotated[
        Env,
        typer.Option(
            help="Where to run: local (this process, without FLARE), sim (FLARE's simulator, one process per site), "
            "poc (server and sites as separate processes on this machine, over mTLS) or prod (a running federation, "
            "see --kit)"
        ),
    ] = "sim",
    kit: AdminKit = None,
    out: Out = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="last|new|RUN", help="Continue or replace a run; default: a new run, nothing is replaced"),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Run a job, show a line for each round, and write model and record to the result folder.

    The same settings end with the same model in every environment, bit for bit. Unless --env is given, the job runs in
    FLARE's simulator. The section deployment of the configuration says what the job carries (packaging: byoc: the
    package's source) and which service receives the figures of its rounds (track: tensorboard, mlflow, wandb). Ctrl-C
    stops the run after its last committed round and prints the command that continues it. --env prod needs --kit, the
    startup kit of an admin who may submit jobs.

    The result folder is runs/<name>, with --env local runs/<name>-local, and with -2, -3, ... after it if that holds a
    finished run; --out names another one.

    --start last continues the interrupted run of the result folder from its last committed round; --start new replaces
    the run of the result folder. --start RUN, the result folder of a finished run, which is not changed, continues it
    up to the larger total of method.rounds, as if it had had all rounds at once; the default of --out is then
    RUN-ROUNDS. It is not for --env prod, nor for methods whose schedule depends on the number of rounds.

    With --json, standard output has the line of each round as in rounds.jsonl, then the summary, with the folder.

    Exit codes: 0: finished, every site contributed to at least one round. 3: finished, but a site contributed to no
    round; the last lines name it and the reason. 1: failed. 2: wrong configuration or option, nothing was started.
    130: stopped by Ctrl-C.

    Examples:

        flare-sparse run app_configs/neurosfl_brain_age.yaml

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env local --set method.rounds=2

        flare-sparse run app_configs/neurosfl_brain_age.yaml --set method.sparsity=0.98 --out runs/p98

        flare-sparse run app_configs/neurosfl_brain_age.yaml --start last

        flare-sparse run fedavg_brain_age --set method.rounds=30 --start runs/fedavg_brain_age

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env prod --kit kits/lead@coordination.org
    """
    from ..api.start import PATIENCE_S, check_start, launch, name_run
    from ..config.study import Study
    from ..results.runs.folder import RunFolder
    from ..results.runs.results import RunResult
    from .outcome import RunProgress, explain_outcome
    from .summary import PARTIAL, show_result

    study = Study.load(config, set_ or ())
    check_start(env, study, start, kit)
    name = name_run(study, env)
    chosen = RunFolder.open(name, study, start, out)
    progress = RunProgress(config, env, kit, set_ or (), chosen.path, chosen.replaces)
    # A killed simulation holds the lock until its processes notice that their command is gone.
    with chosen.claim(0.0 if env == "local" else PATIENCE_S):
        folder = chosen.prepare(keeps_state=env != "prod", advise=progress.format_command)
        with open_screen(env) as console:
            if out is None and not JSON.get() and chosen.path.name != name and not chosen.resume:
                console.print(f"runs/{name} holds a finished run; this one is written to {chosen.path}")
            with explain_outcome(progress), show_training(console, folder.path, progress):
                launch(env, study, folder, RunScreen(console, progress), kit)
            result = RunResult.read(folder.path)
            if JSON.get():
                console.print(json.dumps({"folder": str(folder.path), **result.summary}))
            else:
                show_result(console, result)
    if result.idle_sites:
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

    With --json it prints the line of each round as it stands in ``rounds.jsonl``, and nothing else.
    """

    def __init__(self, console: Console, progress: RunProgress):
        super().__init__(console)
        self._progress = progress

    def say(self, text: str) -> None:
        if not JSON.get():
            super().say(text)

    def see_round(self, line: dict[str, Any]) -> None:
        self._progress.record(line)
        if JSON.get():
            self._console.print(json.dumps(line))
        else:
            super().see_round(line)


@contextmanager
def open_screen(env: Env) -> Iterator[Console]:
    """Yield a console that reaches the screen while FLARE's output goes to a log file."""
    # FLARE's simulator prints to this process's own standard output, which is sent to a log file meanwhile
    # (flare/launch/simulator.py); the duplicate still reaches the screen.
    with nullcontext(sys.stdout) if env == "local" else os.fdopen(os.dup(1), "w") as screen:
        console = LastingConsole(file=screen)
        yield console
        if console.quiet:
            # What is left in the buffer would fail once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), screen.fileno())
            err.print("standard output took no more lines; those of all rounds are in rounds.jsonl")
