"""``flare-sparse sweep``: run a configuration with several settings and seeds, and keep the settings that won."""

from __future__ import annotations

import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..checkpoint.writing import write_json
from ..config import RunConfig, dump_config, list_user_code, load_config
from ..errors import ConfigError
from ..runs.folder import SUMMARY
from ..runs.progress import format_bytes
from ..runs.sweep import SettingsResult, Trial, expand_grid, rank_settings
from .console import out as console
from .local import run_config_locally
from .options import ConfigFile, Overrides
from .resume import has_checkpoint
from .user_modules import copy_user_code

RECORD, WINNER, FIGURE = "sweep.json", "best.yaml", "sweep.png"


def sweep(
    config: ConfigFile,
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="KEY.PATH=VALUE,...",
            help="Values of a setting to try; repeatable: all combinations are run",
            show_default=False,
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per setting, from the configuration's on")] = 3,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time, a process each")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the sweep; default: runs/NAME-sweep; the same folder continues a sweep"),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Run a configuration with all combinations of some settings, and choose by the metric on validation examples.

    The runs are local ones (--env local), without FLARE. The same command continues an interrupted sweep: finished runs
    are kept, others resumed. Writes a table (sweep.json), a figure (sweep.png, with the extra report) and the
    configuration with the settings that won (best.yaml). Test examples choose nothing; evaluate the winner with
    flare-sparse report.

    [dim]flare-sparse sweep app_configs/neurosfl_brain_age.yaml --grid method.sparsity=0.8,0.9 --set
    task.split.validation=0.1[/]
    """
    overrides = list(set_ or ())
    base = load_config(config, overrides)
    if not base.task.config.split.validation:
        raise ConfigError(
            "sweep chooses on validation examples, but task.split.validation is 0; add --set task.split.validation=0.1"
        )
    folder = out or Path("runs") / f"{base.name}-sweep"
    trials = expand_grid(grid, range(base.seed, base.seed + seeds))
    # All settings are checked before the first run starts.
    pending = [trial for trial in trials if not _is_finished(_load(config, overrides, trial), folder / trial.folder)]
    console.print(f"{len(trials)} runs, {len(trials) - len(pending)} of them finished; folder: {folder}", markup=False)
    folder.mkdir(parents=True, exist_ok=True)
    start = partial(run_trial, config.resolve(), overrides, folder=folder.resolve())
    if parallel == 1:
        for trial in pending:
            console.print(start(trial), markup=False)
    else:
        # A new interpreter for each worker: torch's threads do not survive a fork.
        with ProcessPoolExecutor(parallel, multiprocessing.get_context("spawn")) as pool:
            for line in pool.map(start, pending):
                console.print(line, markup=False)
    summaries = {trial: json.loads((folder / trial.folder / SUMMARY).read_text(encoding="utf-8")) for trial in trials}
    ranked, metric = rank_settings(summaries), summaries[trials[0]]["metric"]
    _write(ranked, metric, folder, config, overrides)
    console.print(_build_table(ranked, metric["name"]))
    console.print(f"best settings: {folder / WINNER}", markup=False)


def run_trial(file: Path, overrides: list[str], trial: Trial, *, folder: Path) -> str:
    """Run a trial, or resume it, and return a line of text about it."""
    config, out = _load(file, overrides, trial), folder / trial.folder
    summary = run_config_locally(config, file, out, resume=has_checkpoint(out), console=Console(file=StringIO()))
    name = summary["metric"]["name"]
    value = summary["final"]["metrics"].get(f"validation_{name}")
    shown = "-" if value is None else f"{value:.4g}"
    return f"{trial.folder}: validation {name} {shown}, {summary['seconds']:.0f} s"


def _load(file: Path, overrides: list[str], trial: Trial) -> RunConfig:
    return load_config(file, [*overrides, *trial.settings, f"seed={trial.seed}"])


def _is_finished(config: RunConfig, out: Path) -> bool:
    """Return whether a folder holds the finished run of a configuration.

    Raises:
        ConfigError: it holds a run of other settings.
    """
    if not (out / SUMMARY).is_file():
        return False
    if (out / "config.yaml").read_text(encoding="utf-8") != dump_config(config):
        raise ConfigError(f"{out}: holds a run of other settings than this sweep; choose another --out")
    return True


def _write(
    ranked: list[SettingsResult], metric: dict[str, Any], folder: Path, file: Path, overrides: list[str]
) -> None:
    best, unit = ranked[0], metric["unit"]
    rows = [
        {
            "settings": list(r.settings),
            "validation": r.values,
            "mean": r.mean,
            "deviation": r.deviation,
            "bytes": r.sent,
        }
        for r in ranked
    ]
    write_json(folder / RECORD, {"metric": metric, "config": str(file), "overrides": overrides, "results": rows})
    won = f"{folder.name} of {len(ranked)} settings with {len(best.values)} seeds: {', '.join(best.settings)}."
    lines = [
        f"# Settings that won {won}",
        f"# {metric['name']} on validation examples, mean over the seeds: {best.mean:.4g} {unit}".rstrip(),
    ]
    winner = load_config(file, [*overrides, *best.settings])
    copy_user_code(list_user_code(winner, file.parent), folder)
    (folder / WINNER).write_text("\n".join(lines) + "\n" + dump_config(winner), encoding="utf-8")
    try:
        from ..report.sweep import write_sweep_figure
    except ImportError:
        return
    write_sweep_figure(ranked, f"{metric['name']} ({unit})" if unit else metric["name"], folder / FIGURE)


def _build_table(ranked: list[SettingsResult], metric: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("settings", overflow="fold")
    for column in (f"validation {metric}", "deviation", "sent"):
        table.add_column(column, justify="right")
    for result in ranked:
        deviation = "-" if result.deviation is None else f"{result.deviation:.4g}"
        table.add_row(", ".join(result.settings), f"{result.mean:.4g}", deviation, format_bytes(result.sent))
    return table
