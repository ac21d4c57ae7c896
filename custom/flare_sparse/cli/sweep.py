"""``flare-sparse sweep``: run a configuration with several settings and seeds, and keep the settings that won."""

from __future__ import annotations

import json
import logging
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..config.loading import dump_config, load_config
from ..config.schema import RunConfig
from ..config.user_tasks import list_user_code
from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, FlareSparseError, describe_exception
from ..results.runs.folder import CONFIG, SUMMARY
from ..results.runs.progress import format_bytes
from ..results.runs.sweep import Search, SettingsResult, Trial, expand_seeds, find_unequal_validation, run_search
from .console import out as console
from .local import run_config_locally
from .options import ConfigFile, Overrides
from .result_folder import claim_result_folder
from .resume import has_checkpoint
from .user_modules import copy_user_code

RECORD, STUDY, WINNER, FIGURE = "sweep.json", "sweep.db", "best.yaml", "sweep.png"
_LOG = logging.getLogger(__name__)


def sweep(
    config: ConfigFile,
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="KEY.PATH=VALUE,...",
            help="Values of a setting to try, or a range LOW..HIGH[,log]; repeatable: all combinations are run",
            show_default=False,
        ),
    ],
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Settings that a sampler (TPE) chooses by the results so far; default: all combinations"
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training; default: as configured")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per setting, from the configuration's on")] = 3,
    parallel: Annotated[int, typer.Option(min=1, help="Runs at a time, a process each")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the sweep; default: runs/NAME-sweep; the same folder continues a sweep"),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Run a configuration with several settings, and choose by the metric on validation examples.

    All combinations of the values are run, or with --trials as many settings as a sampler chooses (Optuna's TPE). The
    runs are local ones (--env local), without FLARE. The same command continues an interrupted sweep: finished runs are
    kept, others resumed, failed ones too. Settings with a run without a result are ranked last. Writes a table
    (sweep.json), a figure (sweep.png, with the extra report), Optuna's database (sweep.db) and the configuration with
    the settings that won (best.yaml). With several seeds, some test subjects of one seed are validation subjects of
    another; with --seeds 1 they choose nothing (docs/evaluation.md).

    [dim]flare-sparse sweep app_configs/neurosfl_brain_age.yaml --grid method.sparsity=0.8,0.9 --set
    task.split.validation=0.1[/]
    """
    overrides = [*(set_ or ()), *(() if rounds is None else (f"method.rounds={rounds}",))]
    base = load_config(config, overrides)
    if not base.task.config.split.validation:
        raise ConfigError(
            "sweep chooses on validation examples, but task.split.validation is 0; add --set task.split.validation=0.1"
        )
    folder = out or Path("runs") / f"{base.name}-sweep"
    folder.mkdir(parents=True, exist_ok=True)
    search = Search(grid, f"sqlite:///{folder.resolve() / STUDY}", trials=trials, seed=base.seed)
    all_seeds = range(base.seed, base.seed + seeds)

    def list_pending(listed: Iterable[Trial]) -> list[Trial]:
        return [trial for trial in listed if not _is_finished(_load(config, overrides, trial), folder / trial.folder)]

    # All settings that are known are checked before the first run starts.
    known = expand_seeds(search.known, all_seeds)
    finished = len(known) - len(list_pending(known))
    console.print(f"{search.count * seeds} runs, {finished} of them finished; folder: {folder}", markup=False)
    start = partial(run_trial, config.resolve(), overrides, folder=folder.resolve())
    ranked, metric = run_search(
        search,
        all_seeds,
        lambda batch: _run_trials(list_pending(batch), start, parallel),
        lambda trial: json.loads((folder / trial.folder / SUMMARY).read_text(encoding="utf-8")),
        at_a_time=parallel,
    )
    warning = find_unequal_validation(ranked)
    _write(ranked, metric, folder, config, overrides, warning)
    console.print(_build_table(ranked, metric["name"]))
    if warning:
        console.print(f"[bold yellow]WARN[/] {escape(warning)}")
    console.print(f"best settings: {folder / WINNER}", markup=False)


def _run_trials(
    pending: list[Trial], start: Callable[[Trial], tuple[str, str | None]], parallel: int
) -> dict[Trial, str]:
    if parallel == 1:
        return _print_trials(pending, map(start, pending))
    # A new interpreter for each worker: torch's threads do not survive a fork.
    with ProcessPoolExecutor(parallel, multiprocessing.get_context("spawn")) as pool:
        try:
            return _print_trials(pending, pool.map(start, pending))
        except BrokenProcessPool as error:
            raise ConfigError(
                "a process of the sweep ended without a result, as one does that takes more memory than the machine"
                f" has; lower --parallel {parallel}. The same command continues the sweep"
            ) from error


def _print_trials(trials: Iterable[Trial], results: Iterable[tuple[str, str | None]]) -> dict[Trial, str]:
    """Print a line for each trial as it ends, and return why the failed ones failed."""
    failures = {}
    for trial, (line, failure) in zip(trials, results, strict=True):
        console.print(line, markup=False)
        if failure is not None:
            failures[trial] = failure
    return failures


def run_trial(file: Path, overrides: list[str], trial: Trial, *, folder: Path) -> tuple[str, str | None]:
    """Run a trial, or resume it, and return a line of text about it, and why it failed; None if it did not."""
    config, out = _load(file, overrides, trial), folder / trial.folder
    out.mkdir(parents=True, exist_ok=True)
    # Before the run, so that a later sweep with other settings notices a run that failed, too.
    (out / CONFIG).write_text(dump_config(config), encoding="utf-8")
    try:
        with claim_result_folder(out):
            silent = Console(file=StringIO())
            summary = run_config_locally(config, file, out, resume=has_checkpoint(out), console=silent)
    except FlareSparseError as error:
        # As text: some errors hold what cannot be sent to the process of the sweep.
        reason = f"{error.code}: {error}"
        return f"{trial.label} failed: {reason}", reason
    except (MemoryError, OSError, RuntimeError) as error:
        # Of the machine, such as torch's lack of memory, or of the user's own code: the same command tries again.
        _LOG.warning("%s failed", trial.label, exc_info=True)
        reason = describe_exception(error)
        return f"{trial.label} failed: {reason}", reason
    name = summary["metric"]["name"]
    value = summary["final"]["metrics"].get(f"validation_{name}")
    shown = "-" if value is None else f"{value:.4g}"
    return f"{trial.folder}: validation {name} {shown}, {summary['seconds']:.0f} s", None


def _load(file: Path, overrides: list[str], trial: Trial) -> RunConfig:
    return load_config(file, [*overrides, *trial.settings, f"seed={trial.seed}"])


def _is_finished(config: RunConfig, out: Path) -> bool:
    """Return whether a folder holds the finished run of a configuration.

    Raises:
        ConfigError: it holds a run of other settings, finished or not.
    """
    started = out / CONFIG
    if started.is_file() and started.read_text(encoding="utf-8") != dump_config(config):
        raise ConfigError(f"{out}: holds a run of other settings than this sweep; choose another --out")
    return (out / SUMMARY).is_file()


def _write(
    ranked: list[SettingsResult],
    metric: dict[str, Any],
    folder: Path,
    file: Path,
    overrides: list[str],
    warning: str,
) -> None:
    best, unit = ranked[0], metric["unit"]
    rows = [
        {
            "settings": list(r.settings),
            "validation": r.values,
            "mean": r.mean,
            "deviation": r.deviation,
            "bytes": r.sent,
            "failed": r.failures,
        }
        for r in ranked
    ]
    record = {"metric": metric, "config": str(file), "overrides": overrides, "results": rows, "warning": warning}
    write_json(folder / RECORD, record)
    won = f"{folder.name} of {len(ranked)} settings with {len(best.values)} seeds: {', '.join(best.settings)}."
    lines = [
        f"# Settings that won {won}",
        f"# {metric['name']} on validation examples, mean over the seeds: {best.mean:.4g} {unit}".rstrip(),
        *(f"# seed {seed} has no result with these settings" for seed in best.failures),
        *([f"# {warning}"] if warning else []),
    ]
    winner = load_config(file, [*overrides, *best.settings])
    copy_user_code(list_user_code(winner, file.parent), folder)
    (folder / WINNER).write_text("\n".join(lines) + "\n" + dump_config(winner), encoding="utf-8")
    try:
        from ..results.report.sweep import write_sweep_figure
    except ImportError:
        return
    write_sweep_figure(ranked, f"{metric['name']} ({unit})" if unit else metric["name"], folder / FIGURE)


def _build_table(ranked: list[SettingsResult], metric: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("settings", overflow="fold")
    has_failures = any(result.failures for result in ranked)
    for column in (f"validation {metric}", "deviation", "sent", *(["failed"] if has_failures else [])):
        table.add_column(column, justify="right")
    for result in ranked:
        mean, deviation = ("-" if value is None else f"{value:.4g}" for value in (result.mean, result.deviation))
        sent = "-" if result.sent is None else format_bytes(result.sent)
        failed = ", ".join(f"seed {seed}" for seed in result.failures)
        table.add_row(", ".join(result.settings), mean, deviation, sent, *([failed] if has_failures else []))
    return table
