"""``flare-sparse run``: run a configuration from its data to its record, in one of four environments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..core.errors import ConfigError
from .console import out as stdout
from .environments import run_in_environment
from .options import ConfigFile, Overrides, load_with_options
from .outcome import Env, RunCommand, explain_outcome
from .result_folder import PATIENCE_S, choose_default_folder, claim_result_folder, prepare_result_folder
from .resume import ContinueFrom, Resume, StepBack, check_step_back, continue_run
from .summary import PARTIAL, find_idle_sites, read_last_round, show_result
from .tracking import resolve_tracking_uri


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
    kit: Annotated[
        Path | None, typer.Option(help="Startup kit of an admin who may submit jobs; only with --env prod")
    ] = None,
    byoc: Annotated[
        bool, typer.Option("--byoc", help="Send the package's source with the job; only with --env prod")
    ] = False,
    sites: Annotated[int | None, typer.Option(help="Number of simulated sites; default: as configured")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training; default: as configured")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all random numbers of the run; default: as configured")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Result folder; default: runs/<name>, with --env local runs/<name>-local; with -2, -3, ... if that "
            "holds a finished run"
        ),
    ] = None,
    resume: Resume = False,
    step_back: StepBack = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the finished or interrupted run that the result folder holds")
    ] = False,
    continue_from: ContinueFrom = None,
    mlflow: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="Send the figures of every round to MLflow: its address, or with sim and poc a folder. The experiment "
            "is named after the configuration or by MLFLOW_EXPERIMENT_NAME, the run after the result folder. Needs the "
            "extra mlflow at the server; default: no MLflow",
        ),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Run a job, show a line for each round, and write model and record to the result folder.

    The same settings end with the same model in every environment, bit for bit. Unless --env is given, the job runs in
    FLARE's simulator. Ctrl-C stops the run after its last committed round and prints the command that continues it.

    Exit codes: 0: finished, every site contributed to at least one round. 3: finished, but a site contributed to no
    round; the last lines name it and the reason. 1: failed. 2: wrong configuration or option, nothing was started.
    130: stopped by Ctrl-C.

    Examples:

        flare-sparse run app_configs/neurosfl_brain_age.yaml

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env local --rounds 2

        flare-sparse run app_configs/neurosfl_brain_age.yaml --rounds 20 --set method.sparsity=0.98 --out runs/p98

        flare-sparse run app_configs/neurosfl_brain_age.yaml --resume

        flare-sparse run app_configs/neurosfl_brain_age.yaml --resume --step-back 1

        flare-sparse run runs/fedavg_brain_age/config.yaml --rounds 30 --continue-from runs/fedavg_brain_age

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env prod --kit kits/lead@coordination.org
    """
    _check_options(env, sites=sites, resume=resume, overwrite=overwrite, kit=kit, byoc=byoc)
    check_step_back(step_back, env, resume=resume, continue_from=continue_from)
    if overwrite and continue_from is not None:
        raise ConfigError("--continue-from replaces no run; leave --overwrite out and choose a new --out")
    tracking_uri = resolve_tracking_uri(mlflow, env) if mlflow is not None else None
    resolved = load_with_options(config, sites, rounds, seed, set_)
    name = f"{resolved.name}-local" if env == "local" else resolved.name
    if continue_from is not None:
        chosen = continue_run(continue_from, resolved, config, out, env, resume=resume)
        resume = True
    else:
        chosen = out or choose_default_folder(name, resume=resume, overwrite=overwrite)
    options = {
        "env": env,
        "kit": kit,
        "byoc": byoc,
        "sites": sites,
        "rounds": rounds,
        "seed": seed,
        "mlflow": mlflow,
    }
    command = RunCommand(config, chosen, options, tuple(set_ or ()))
    # A killed simulation holds the lock until its processes notice that their command is gone.
    with claim_result_folder(chosen, 0.0 if env == "local" else PATIENCE_S):
        folder = prepare_result_folder(command, resume=resume, overwrite=overwrite, is_deployed=env == "prod")
        with open_screen(env) as console:
            if out is None and chosen.name != name and not resume:
                console.print(f"runs/{name} holds a finished run; this one is written to {chosen}")
            # FLARE makes new keys for every POC federation, so an encrypted run there starts again.
            restarts = env == "poc" and resolved.encrypted
            with explain_outcome(command, env, restarts=restarts) as progress:
                summary = run_in_environment(
                    env,
                    resolved,
                    config,
                    folder,
                    console,
                    resume=resume,
                    step_back=step_back or 0,
                    kit=kit,
                    byoc=byoc,
                    mlflow=tracking_uri,
                    on_line=progress.record,
                    restart_command=command.format(),
                )
            show_result(console, summary, folder)
    if find_idle_sites(summary, read_last_round(folder)):
        raise typer.Exit(PARTIAL)


@contextmanager
def open_screen(env: Env) -> Iterator[Console]:
    """Yield a console that reaches the screen while FLARE's output goes to a log file."""
    if env == "local":
        yield stdout
        return
    # FLARE's simulator prints to this process's own standard output, which is sent to a log file meanwhile
    # (flare/launch/simulator.py); the duplicate still reaches the screen.
    with os.fdopen(os.dup(1), "w") as screen:
        yield Console(file=screen, highlight=False, soft_wrap=True)


def _check_options(env: str, *, sites: int | None, resume: bool, overwrite: bool, kit: Path | None, byoc: bool) -> None:
    """Raises:
    ConfigError: an option does not apply to the environment.
    """
    if resume and overwrite:
        raise ConfigError("--resume continues the run in --out, --overwrite replaces it; leave one of them out")
    if env == "prod":
        if kit is None:
            raise ConfigError("--env prod needs --kit: the startup kit of an admin who may submit jobs")
        if sites is not None:
            raise ConfigError("--sites does not apply to --env prod, where the connected sites take part; leave it out")
    elif kit is not None or byoc:
        raise ConfigError(f"{'--kit' if kit else '--byoc'} is for --env prod, not for --env {env}; leave it out")
