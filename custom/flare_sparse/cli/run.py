"""``flare-sparse run``: a configuration, start to finish."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from ..assemble import assemble
from ..config import RunConfig, dump_config, load_config, load_task, load_user_task_class
from ..data.source import write_site_files
from ..errors import ConfigError
from ..report.card import write_card
from ..runs.progress import progress_line
from ..runs.results import Run
from ..task import SiteData, Task
from .keys import FOLDER as KEYS
from .keys import opened, run_contexts
from .resume import FOLDER, Resume, checkpoint_root
from .sites import simulated_sites
from .summary import show_result

if TYPE_CHECKING:
    from ..flare.recipe import SparseRecipe

Env = Literal["sim", "poc", "prod"]


def run(
    config: Annotated[Path, typer.Argument(help="configuration file, such as app_configs/neurosfl_brain_age.yaml")],
    env: Annotated[
        Env,
        typer.Option(
            help="sim: FLARE's simulator; poc: a server and sites as processes of their own on this machine, over mTLS; "
            "prod: a running federation, with --kit"
        ),
    ] = "sim",
    kit: Annotated[Path | None, typer.Option(help="prod: startup kit of an admin who may submit jobs")] = None,
    byoc: Annotated[bool, typer.Option("--byoc", help="prod: send the package's source along")] = False,
    sites: Annotated[int | None, typer.Option(help="number of simulated sites")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds of training")] = None,
    seed: Annotated[int | None, typer.Option(help="all randomness of the run derives from it")] = None,
    out: Annotated[Path | None, typer.Option(help="result folder; default: runs/<name>")] = None,
    resume: Resume = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, such as method.sparsity=0.95")
    ] = None,
) -> None:
    """Run a job and show what came out.

    Examples:

        flare-sparse run app_configs/neurosfl_brain_age.yaml

        flare-sparse run app_configs/neurosfl_brain_age.yaml --rounds 20 --set method.sparsity=0.98 --out runs/p98

        flare-sparse run app_configs/neurosfl_brain_age.yaml --resume

        flare-sparse run app_configs/neurosfl_brain_age.yaml --env prod --kit kits/lead@coordination.org
    """
    _fit(env, sites=sites, resume=resume, kit=kit, byoc=byoc)
    resolved = with_options(config, sites, rounds, seed, set_)
    folder = (out or Path("runs") / resolved.name).resolve()
    with os.fdopen(os.dup(1), "w") as screen:  # the simulator sends this process's own output to a file
        console = Console(file=screen, highlight=False)
        if env == "sim":
            summary = run_in_simulator(resolved, config, folder, console, resume=resume)
        elif kit is None:
            summary = run_in_poc(resolved, config, folder, console, resume=resume)
        else:
            summary = run_in_federation(resolved, config, folder, console, kit, byoc=byoc)
        show_result(console, summary, folder)


def _fit(env: str, *, sites: int | None, resume: bool, kit: Path | None, byoc: bool) -> None:
    """Raises:
    ConfigError: an option that means nothing in this environment.
    """
    if env == "prod":
        if kit is None:
            raise ConfigError("--env prod needs --kit: the startup kit of an admin who may submit jobs")
        if resume:
            raise ConfigError("--resume: with --env prod leave it out; a job submitted again goes on by itself")
        if sites is not None:
            raise ConfigError("--sites: with --env prod the federation's sites take part; leave it out")
    elif kit is not None or byoc:
        raise ConfigError(f"{'--kit' if kit else '--byoc'} is for --env prod; this is --env {env}")


def with_options(
    config: Path, sites: int | None, rounds: int | None, seed: int | None, overrides: list[str] | None
) -> RunConfig:
    """The configuration with the short options written over it."""
    short = {"simulator.sites": sites, "method.rounds": rounds, "seed": seed}
    given = [f"{key}={value}" for key, value in short.items() if value is not None]
    return load_config(config, [*(overrides or []), *given])


def run_in_simulator(
    config: RunConfig, file: Path, out: Path, console: Console, *, resume: bool = False
) -> dict[str, Any]:
    """Prepare the sites' data, run the job, follow its rounds."""
    from ..flare.launch.simulator import simulate  # FLARE takes seconds to import; --help must not wait for it

    checkpoints = _checkpoints(config, file, out, resume=resume)
    contexts = run_contexts(config, out, resume=resume)
    sites = _sites(config, file, out, console)
    site_files = write_site_files(out / "sites", sites.values())
    _say(console, config, f"{len(sites)} sites in FLARE's simulator")
    summary = simulate(
        _recipe(config, file, tensorboard=_has_tensorboard()),
        sorted(sites),
        site_files,
        out,
        checkpoints=checkpoints,
        keys=out / KEYS if contexts else None,
        on_round=lambda line: console.print(progress_line(line)),
    )
    if contexts:
        summary = opened(config, load_task(config, file.parent), out, contexts.client)
    return _recorded(config, file, out, summary)


def run_in_poc(config: RunConfig, file: Path, out: Path, console: Console, *, resume: bool = False) -> dict[str, Any]:
    """As in the simulator, with a server and sites that FLARE provisions and starts as processes of their own.

    Raises:
        ConfigError: an encrypted run cannot be resumed here: FLARE makes new keys for every POC federation.
    """
    from ..flare.launch.poc import client_context, poc
    from ..flare.launch.submission import run_deployed

    if resume and config.encrypted:
        raise ConfigError("--resume: every POC federation has keys of its own; leave it out, or use --env sim")
    checkpoints = _checkpoints(config, file, out, resume=resume)
    sites = _sites(config, file, out, console)
    _say(console, config, f"{len(sites)} sites as processes of their own (nvflare poc, mTLS)")
    with poc(out / "poc", sites, checkpoints, encrypted=config.encrypted) as kit:
        summary = run_deployed(_recipe(config, file), kit, out, on_line=console.print)
    if config.encrypted:
        summary = opened(config, load_task(config, file.parent), out, client_context(out / "poc", next(iter(sites))))
    return _recorded(config, file, out, summary)


def run_in_federation(
    config: RunConfig, file: Path, out: Path, console: Console, kit: Path, *, byoc: bool
) -> dict[str, Any]:
    """Submit the job to a running federation and wait for its result; the sites know where their data lies."""
    from ..flare.launch.submission import run_deployed

    out.mkdir(parents=True, exist_ok=True)
    _say(console, config, f"submitted with {kit}")
    summary = run_deployed(_recipe(config, file, byoc=byoc), kit.resolve(), out, on_line=console.print)
    return _recorded(config, file, out, summary)


def _sites(config: RunConfig, file: Path, out: Path, console: Console) -> dict[str, SiteData]:
    """The data of the sites that stand in for real ones."""
    out.mkdir(parents=True, exist_ok=True)
    with console.status("preparing the sites' data ..."):
        return simulated_sites(config, load_task(config, file.parent), out)


def _checkpoints(config: RunConfig, file: Path, out: Path, *, resume: bool) -> Path:
    return checkpoint_root(config, assemble(config, load_task(config, file.parent)), out, resume=resume)


def _recipe(config: RunConfig, file: Path, *, byoc: bool = False, tensorboard: bool = False) -> SparseRecipe:
    """The job; a task of the user's own travels with it, and then so does the package."""
    from ..flare.recipe import SparseRecipe

    modules = own_modules(config, file)
    return SparseRecipe(
        config, packaging="byoc" if modules or byoc else "installed", modules=modules, tensorboard=tensorboard
    )


def own_modules(config: RunConfig, file: Path) -> tuple[Path, ...]:
    """The source file of the user's own task; none for a task of the package."""
    own = load_user_task_class(config, file.parent)
    return (Path(inspect.getfile(own)),) if own else ()


def _say(console: Console, config: RunConfig, where: str) -> None:
    console.print(f"{config.name}: {config.method.name}, {config.method.config.rounds} rounds, {where}")


def _recorded(config: RunConfig, file: Path, out: Path, summary: dict[str, Any]) -> dict[str, Any]:
    keep_own_task(load_user_task_class(config, file.parent), out)
    (out / "config.yaml").write_text(dump_config(config))  # with the simulator's part, so that it can be run again
    write_card(Run.read(out))
    shutil.rmtree(out / FOLDER, ignore_errors=True)  # the result is here: nothing is left to go on from
    return summary


def keep_own_task(own: type[Task] | None, out: Path) -> None:
    """The module of the user's own task beside the record, so that the model can be opened later."""
    if own is not None and (source := Path(inspect.getfile(own))).parent != out:
        shutil.copy2(source, out / source.name)


def _has_tensorboard() -> bool:
    return importlib.util.find_spec("tensorboard") is not None
