"""``flare-sparse run``: a configuration, start to finish."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..config import RunConfig, build_task, dump_config, load_config, user_task
from ..data.source import write_site_files
from ..errors import ConfigError
from ..progress import progress_line
from .result import show_result
from .simulated import simulated_sites


def run(
    config: Annotated[Path, typer.Argument(help="configuration file, such as app_configs/neurosfl_brain_age.yaml")],
    env: Annotated[
        str, typer.Option(help="sim: FLARE's simulator on this machine; poc, prod: from the next release")
    ] = "sim",
    sites: Annotated[int | None, typer.Option(help="number of simulated sites")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds of training")] = None,
    seed: Annotated[int | None, typer.Option(help="all randomness of the run derives from it")] = None,
    out: Annotated[Path | None, typer.Option(help="result folder; default: runs/<name>")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, such as method.sparsity=0.95")
    ] = None,
) -> None:
    """Run a job and show what came out.

    Examples:

        flare-sparse run app_configs/neurosfl_brain_age.yaml

        flare-sparse run app_configs/neurosfl_brain_age.yaml --rounds 20 --set method.sparsity=0.98 --out runs/p98
    """
    resolved = with_options(config, sites, rounds, seed, set_)
    if env != "sim":
        raise ConfigError(f"--env {env}: this release runs 'sim'; export the job for POC or production instead")
    folder = (out or Path("runs") / resolved.name).resolve()
    console = Console(file=os.fdopen(os.dup(1), "w"), highlight=False)
    summary = run_in_simulator(resolved, config, folder, console)
    show_result(console, summary, folder)


def with_options(
    config: Path, sites: int | None, rounds: int | None, seed: int | None, overrides: list[str] | None
) -> RunConfig:
    """The configuration with the short options written over it."""
    short = {"simulator.sites": sites, "method.rounds": rounds, "seed": seed}
    given = [f"{key}={value}" for key, value in short.items() if value is not None]
    return load_config(config, [*(overrides or []), *given])


def run_in_simulator(config: RunConfig, file: Path, out: Path, console: Console) -> dict[str, Any]:
    """Prepare the sites' data, run the job, follow its rounds."""
    from ..flare.recipe import SparseRecipe  # FLARE takes seconds to import; --help must not wait for it
    from ..flare.simulator import simulate

    out.mkdir(parents=True, exist_ok=True)
    own = user_task(config.task.name, file.parent) if config.task.key == "class" else None
    with console.status("preparing the sites' data ..."):
        sites = simulated_sites(config, build_task(config, own), out)
        site_files = write_site_files(out / "sites", sites.values())
    method, rounds = config.method, config.method.config.rounds
    console.print(f"{config.name}: {method.name}, {rounds} rounds, {len(sites)} sites in FLARE's simulator")
    recipe = SparseRecipe(
        config,
        packaging="byoc" if own else "installed",
        modules=(Path(inspect.getfile(own)),) if own else (),
        tensorboard=_has_tensorboard(),
    )
    summary = simulate(
        recipe,
        sorted(sites),
        site_files,
        out,
        on_round=lambda line: console.print(progress_line(line)),
    )
    (out / "config.yaml").write_text(dump_config(config))  # with the simulator's part, so that it can be run again
    return summary


def _has_tensorboard() -> bool:
    import importlib.util

    return importlib.util.find_spec("tensorboard") is not None
