"""``flare-sparse run``: run a configuration from its data to its record, in one of four environments."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from ..assemble import assemble
from ..config import RunConfig, dump_config, load_task, load_user_task_class
from ..data.source import write_site_files
from ..errors import ConfigError
from ..report.card import write_card
from ..runs.progress import format_progress
from ..runs.results import RunResult
from ..task import SiteData
from .console import out as stdout
from .keys import FOLDER as KEYS
from .keys import decrypt_record, prepare_key_contexts
from .local import run_config_locally
from .options import ConfigFile, Overrides, load_with_options
from .resume import FOLDER, Resume, prepare_checkpoints
from .sites import prepare_site_data
from .summary import show_result
from .user_modules import copy_user_module, list_user_modules

if TYPE_CHECKING:
    from ..flare.recipe import SparseRecipe

Env = Literal["local", "sim", "poc", "prod"]


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
        Path | None, typer.Option(help="Result folder; default: runs/<name>, with --env local runs/<name>-local")
    ] = None,
    resume: Resume = False,
    set_: Overrides = None,
) -> None:
    """Run a job, show a line for each round, and write model and record to the result folder.

    The same settings end with the same model in every environment, bit for bit. Unless --env is given, the job runs in
    FLARE's simulator.

    Examples:

        flare-sparse run app_configs/neurosfl_brain_age.yaml

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env local --rounds 2

        flare-sparse run app_configs/neurosfl_brain_age.yaml --rounds 20 --set method.sparsity=0.98 --out runs/p98

        flare-sparse run app_configs/neurosfl_brain_age.yaml --resume

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env prod --kit kits/lead@coordination.org
    """
    _check_options(env, sites=sites, resume=resume, kit=kit, byoc=byoc)
    resolved = load_with_options(config, sites, rounds, seed, set_)
    name = f"{resolved.name}-local" if env == "local" else resolved.name
    folder = (out or Path("runs") / name).resolve()
    if env == "local":
        show_result(stdout, run_config_locally(resolved, config, folder, resume=resume), folder)
        return
    # FLARE's simulator prints to this process's own standard output, which is sent to a log file meanwhile
    # (flare/launch/simulator.py); the duplicate still reaches the screen.
    with os.fdopen(os.dup(1), "w") as screen:
        console = Console(file=screen, highlight=False)
        if env == "sim":
            summary = run_in_simulator(resolved, config, folder, console, resume=resume)
        elif kit is None:
            summary = run_in_poc(resolved, config, folder, console, resume=resume)
        else:
            summary = run_in_federation(resolved, config, folder, console, kit, byoc=byoc)
        show_result(console, summary, folder)


def _check_options(env: str, *, sites: int | None, resume: bool, kit: Path | None, byoc: bool) -> None:
    """Raises:
    ConfigError: an option does not apply to the environment.
    """
    if env == "prod":
        if kit is None:
            raise ConfigError("--env prod needs --kit: the startup kit of an admin who may submit jobs")
        if resume:
            raise ConfigError("--resume does not apply to --env prod; submit the job again, it resumes by itself")
        if sites is not None:
            raise ConfigError("--sites does not apply to --env prod, where the connected sites take part; leave it out")
    elif kit is not None or byoc:
        raise ConfigError(f"{'--kit' if kit else '--byoc'} is for --env prod, not for --env {env}; leave it out")


def run_in_simulator(
    config: RunConfig, file: Path, out: Path, console: Console, *, resume: bool = False
) -> dict[str, Any]:
    """Prepare the sites' data, run the job in FLARE's simulator and return its summary."""
    # FLARE takes seconds to import; --help must not wait for it.
    from ..flare.launch.simulator import simulate

    checkpoints = _prepare_checkpoints(config, file, out, resume=resume)
    contexts = prepare_key_contexts(config, out, resume=resume)
    sites = _prepare_sites(config, file, out, console)
    site_files = write_site_files(out / "sites", sites.values())
    _announce(console, config, f"{len(sites)} sites in FLARE's simulator")
    summary = simulate(
        _build_recipe(config, file, tensorboard=_has_tensorboard()),
        sorted(sites),
        site_files,
        out,
        checkpoints=checkpoints,
        keys=out / KEYS if contexts else None,
        on_round=lambda line: console.print(format_progress(line)),
    )
    if contexts:
        summary = decrypt_record(config, load_task(config, file.parent), out, contexts.client)
    return _complete_record(config, file, out, summary)


def run_in_poc(config: RunConfig, file: Path, out: Path, console: Console, *, resume: bool = False) -> dict[str, Any]:
    """Run the job in a POC federation: FLARE provisions and starts a server and sites as separate processes.

    Raises:
        ConfigError: an encrypted run cannot be resumed here, because FLARE makes new keys for every POC federation.
    """
    from ..flare.launch.poc import read_client_context, start_poc
    from ..flare.launch.submission import run_deployed

    if resume and config.encrypted:
        raise ConfigError(
            "--resume: an encrypted run cannot be resumed with --env poc, where every federation has new keys; leave "
            "--resume out, or use --env sim"
        )
    checkpoints = _prepare_checkpoints(config, file, out, resume=resume)
    sites = _prepare_sites(config, file, out, console)
    _announce(console, config, f"{len(sites)} sites as separate processes (nvflare poc, mTLS)")
    with start_poc(out / "poc", sites, checkpoints, encrypted=config.encrypted) as kit:
        summary = run_deployed(_build_recipe(config, file), kit, out, on_line=console.print)
    if config.encrypted:
        client_context = read_client_context(out / "poc", next(iter(sites)))
        summary = decrypt_record(config, load_task(config, file.parent), out, client_context)
    return _complete_record(config, file, out, summary)


def run_in_federation(
    config: RunConfig, file: Path, out: Path, console: Console, kit: Path, *, byoc: bool
) -> dict[str, Any]:
    """Submit the job to a running federation and wait for its result; each site reads its own data."""
    from ..flare.launch.submission import run_deployed

    out.mkdir(parents=True, exist_ok=True)
    _announce(console, config, f"submitted with {kit}")
    summary = run_deployed(_build_recipe(config, file, byoc=byoc), kit.resolve(), out, on_line=console.print)
    return _complete_record(config, file, out, summary)


def _prepare_sites(config: RunConfig, file: Path, out: Path, console: Console) -> dict[str, SiteData]:
    out.mkdir(parents=True, exist_ok=True)
    with console.status("preparing the sites' data ..."):
        return prepare_site_data(config, load_task(config, file.parent), out)


def _prepare_checkpoints(config: RunConfig, file: Path, out: Path, *, resume: bool) -> Path:
    return prepare_checkpoints(config, assemble(config, load_task(config, file.parent)), out, resume=resume)


def _build_recipe(config: RunConfig, file: Path, *, byoc: bool = False, tensorboard: bool = False) -> SparseRecipe:
    """Build the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe

    modules = list_user_modules(config, file)
    return SparseRecipe(
        config, packaging="byoc" if modules or byoc else "installed", modules=modules, tensorboard=tensorboard
    )


def _announce(console: Console, config: RunConfig, environment: str) -> None:
    console.print(f"{config.name}: {config.method.name}, {config.method.config.rounds} rounds, {environment}")


def _complete_record(config: RunConfig, file: Path, out: Path, summary: dict[str, Any]) -> dict[str, Any]:
    copy_user_module(load_user_task_class(config, file.parent), out)
    # FLARE's own record holds the job part only; with the simulator section the file can be run again.
    (out / "config.yaml").write_text(dump_config(config))
    write_card(RunResult.read(out))
    # Last: until here --resume can continue the run; a finished run cannot be resumed.
    shutil.rmtree(out / FOLDER, ignore_errors=True)
    return summary


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None
