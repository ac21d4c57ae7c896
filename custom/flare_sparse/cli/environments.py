"""A configuration runs in one of four environments: this process, FLARE's simulator, POC mode, or a federation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..config.assemble import assemble
from ..config.loading import dump_config
from ..config.schema import RunConfig
from ..config.user_tasks import list_user_code, load_task
from ..core.errors import ConfigError
from ..results.report.card import write_card
from ..results.runs.continuation import keep_final_checkpoints
from ..results.runs.folder import CONFIG
from ..results.runs.progress import ProgressFormatter
from ..results.runs.results import RunResult
from ..tasks.data.source import write_site_files
from ..tasks.task import SiteData
from .keys import FOLDER as KEYS
from .keys import decrypt_record, prepare_key_contexts
from .local import run_config_locally
from .outcome import Env
from .resume import FOLDER, prepare_checkpoints
from .sites import prepare_site_data
from .tracking import build_tracker
from .user_modules import copy_user_code

if TYPE_CHECKING:
    from ..flare.recipe import SparseRecipe

OnLine = Callable[[dict[str, Any] | str], None]
"""Called with each line of ``rounds.jsonl`` or of display text, before it is shown."""


def run_in_environment(
    env: Env,
    config: RunConfig,
    file: Path,
    out: Path,
    console: Console,
    *,
    resume: bool,
    step_back: int = 0,
    kit: Path | None,
    byoc: bool,
    mlflow: str | None = None,
    on_line: OnLine,
    restart_command: str = "",
) -> dict[str, Any]:
    """Run a configuration in an environment and return its summary.

    Args:
        env: the environment.
        config: the configuration.
        file: where it was read from.
        out: result folder.
        console: receives the lines of text.
        resume: continue the run that the folder holds.
        step_back: number of commits to discard before; not for ``prod``.
        kit: startup kit of an admin; only for ``prod``.
        byoc: send the package's source with the job.
        mlflow: resolved tracking URI; None: no tracking. Not for ``local``.
        on_line: called with each line.
        restart_command: command that submits the job again; only for ``prod``.
    """
    if env == "prod":
        assert kit is not None, "the options were checked"
        return run_in_federation(
            config, file, out, console, kit, byoc=byoc, resume=resume, mlflow=mlflow, on_line=on_line,
            restart_command=restart_command,
        )  # fmt: skip
    if env == "local":
        return run_config_locally(
            config, file, out, resume=resume, step_back=step_back, console=console, on_line=on_line
        )
    runner = run_in_simulator if env == "sim" else run_in_poc
    return runner(config, file, out, console, resume=resume, step_back=step_back, mlflow=mlflow, on_line=on_line)


def ignore_line(line: dict[str, Any] | str) -> None:
    """Do nothing with the line of a round."""


def run_in_simulator(
    config: RunConfig,
    file: Path,
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    step_back: int = 0,
    mlflow: str | None = None,
    on_line: OnLine = ignore_line,
) -> dict[str, Any]:
    """Prepare the sites' data, run the job in FLARE's simulator and return its summary."""
    # FLARE takes seconds to import; --help must not wait for it.
    from ..flare.kits import write_kits
    from ..flare.launch.simulator import simulate
    from ..flare.recipe import refuse_hubs

    refuse_hubs(config)
    checkpoints = _prepare_checkpoints(config, file, out, resume=resume, step_back=step_back)
    contexts = prepare_key_contexts(config, out, resume=resume)
    sites = _prepare_sites(config, file, out, console)
    site_files = write_site_files(out / "sites", sites.values())
    _announce(console, config, f"{len(sites)} sites in FLARE's simulator")

    formatter = ProgressFormatter()

    def show_round(line: dict[str, Any]) -> None:
        on_line(line)
        for text in formatter.format_with_events(line):
            console.print(text, markup=False)

    kits = out / "kits" if config.is_masked else None
    if kits:
        write_kits(kits, sites)
    summary = simulate(
        _build_recipe(config, file, out, mlflow=mlflow, tensorboard=_has_tensorboard()),
        sorted(sites),
        site_files,
        out,
        checkpoints=checkpoints,
        keys=out / KEYS if contexts else None,
        kits=kits,
        on_round=show_round,
    )
    if contexts:
        summary = decrypt_record(config, load_task(config, file.parent), out, contexts.client)
    return _complete_record(config, file, out, summary)


def run_in_poc(
    config: RunConfig,
    file: Path,
    out: Path,
    console: Console,
    *,
    resume: bool = False,
    step_back: int = 0,
    mlflow: str | None = None,
    on_line: OnLine = ignore_line,
) -> dict[str, Any]:
    """Run the job in a POC federation: FLARE provisions and starts a server and sites as separate processes.

    Raises:
        ConfigError: an encrypted run cannot be resumed here, because FLARE makes new keys for every POC federation.
    """
    from ..flare.launch.poc import read_client_context, start_poc
    from ..flare.launch.submission import run_deployed
    from ..flare.recipe import refuse_hubs

    refuse_hubs(config)
    if resume and config.encrypted:
        raise ConfigError(
            "--resume: an encrypted run cannot be resumed with --env poc, where every federation has new keys; leave "
            "--resume out, or use --env sim"
        )
    checkpoints = _prepare_checkpoints(config, file, out, resume=resume, step_back=step_back)
    sites = _prepare_sites(config, file, out, console)
    _announce(console, config, f"{len(sites)} sites as separate processes (nvflare poc, mTLS)")
    with start_poc(out / "poc", sites, checkpoints, encrypted=config.encrypted) as kit:
        recipe = _build_recipe(config, file, out, mlflow=mlflow)
        summary = run_deployed(recipe, kit, out, on_line=_build_printer(console, on_line))
    if config.encrypted:
        client_context = read_client_context(out / "poc", next(iter(sites)))
        summary = decrypt_record(config, load_task(config, file.parent), out, client_context)
    return _complete_record(config, file, out, summary)


def run_in_federation(
    config: RunConfig,
    file: Path,
    out: Path,
    console: Console,
    kit: Path,
    *,
    byoc: bool,
    resume: bool = False,
    mlflow: str | None = None,
    on_line: OnLine = ignore_line,
    restart_command: str = "",
) -> dict[str, Any]:
    """Submit the job to a running federation and wait for its result; each site reads its own data.

    With ``resume`` the job that was last submitted from ``out`` is followed if the server still runs it.
    """
    from ..flare.launch.submission import run_deployed

    out.mkdir(parents=True, exist_ok=True)
    _announce(console, config, f"submitted with {kit}")
    show = _build_printer(console, on_line)
    recipe = _build_recipe(config, file, out, mlflow=mlflow, byoc=byoc)
    summary = run_deployed(recipe, kit.resolve(), out, on_line=show, resume=resume, restart_command=restart_command)
    return _complete_record(config, file, out, summary)


def _prepare_sites(config: RunConfig, file: Path, out: Path, console: Console) -> dict[str, SiteData]:
    out.mkdir(parents=True, exist_ok=True)
    with console.status("preparing the sites' data ..."):
        return prepare_site_data(config, load_task(config, file.parent), out)


def _prepare_checkpoints(config: RunConfig, file: Path, out: Path, *, resume: bool, step_back: int) -> Path:
    assembly = assemble(config, load_task(config, file.parent))
    return prepare_checkpoints(config, assembly, out, resume=resume, step_back=step_back)


def _build_recipe(
    config: RunConfig, file: Path, out: Path, *, mlflow: str | None, byoc: bool = False, tensorboard: bool = False
) -> SparseRecipe:
    """Build the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe

    modules = list_user_code(config, file.parent)
    return SparseRecipe(
        config,
        packaging="byoc" if modules or byoc else "installed",
        modules=modules,
        tensorboard=tensorboard,
        tracker=build_tracker(mlflow, config, out),
    )


def _build_printer(console: Console, on_line: OnLine) -> Callable[[str], None]:
    def show(line: str) -> None:
        on_line(line)
        console.print(line, markup=False)

    return show


def _announce(console: Console, config: RunConfig, environment: str) -> None:
    console.print(f"{config.name}: {config.method.name}, {config.method.config.rounds} rounds, {environment}")


def _complete_record(config: RunConfig, file: Path, out: Path, summary: dict[str, Any]) -> dict[str, Any]:
    copy_user_code(list_user_code(config, file.parent), out)
    # FLARE's own record holds the job part only; with the simulator section the file can be run again.
    (out / CONFIG).write_text(dump_config(config))
    write_card(RunResult.read(out))
    # Last: until here --resume can continue the run; a finished run cannot be resumed.
    keep_final_checkpoints(out / FOLDER)
    return summary


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None
