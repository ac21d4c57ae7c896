"""Sweeps: a study with several settings and seeds, ranked on validation examples: ``flare_sparse.sweep``."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ..config.loading import dump_config, keep_known_settings
from ..config.schema import DeploymentConfig
from ..config.study import Study
from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, FlareSparseError, describe_exception
from ..core.observer import SILENT, Observer
from ..results.runs.folder import RunFolder, copy_user_code
from ..results.runs.record import CONFIG, SUMMARY
from ..results.runs.sweep import (
    SettingsResult,
    Trial,
    expand_grid,
    find_best_of_methods,
    find_unequal_validation,
    rank_settings,
)
from ..tasks.task import VALIDATION
from .report import compare_runs
from .start import Overrides, launch, list_overrides

RECORD, WINNER, FIGURE = "sweep.json", "best.yaml", "sweep.png"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sweep:
    """A sweep that has ended.

    Attributes:
        path: folder of the sweep, with ``sweep.json``, ``best.yaml`` and a result folder for each run.
        results: settings with their runs, best first.
        metric: name, unit and mode of the task's metric.
        warning: why the settings cannot be compared; empty: they can.
        methods: where methods were values: each with its best settings, the metric on the test subjects of all seeds,
            and the paired difference from the first method, with its 95 % interval; the best on validation first.
    """

    path: Path
    results: tuple[SettingsResult, ...]
    metric: dict[str, Any]
    warning: str
    methods: tuple[dict[str, Any], ...] = ()

    @property
    def winner(self) -> Path:
        """Configuration with the settings that won."""
        return self.path / WINNER


def sweep(
    config: str | Path,
    grid: Sequence[str] | Mapping[str, Sequence[Any] | str],
    overrides: Overrides = (),
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    observer: Observer = SILENT,
) -> Sweep:
    """Run a configuration in this process with several settings, and rank them.

    The same call continues an interrupted sweep: finished runs are kept, others resumed, failed ones too.

    Args:
        config: YAML file.
        grid: values of each setting: ``["method.sparsity=0.8,0.9"]`` or ``{"method.sparsity": [0.8, 0.9]}``.
            Methods are values like others, ``{"method.name": ["fedavg", "neurosfl"]}``; a setting that one of them
            lacks is left out of its runs.
        overrides: settings of all runs.
        seeds: seeds per setting, from the configuration's on.
        out: folder of the sweep; None: ``runs/NAME-sweep``.
        observer: hears of each run that ends.

    Raises:
        ConfigError: a wrong setting, no validation examples, or no run has finished.

    Examples:
        >>> grid = {"method.sparsity": [0.5, 0.75]}
        >>> best = sweep("study.yaml", grid, {"task.split.validation": 0.2}, seeds=1, out="swept")
        >>> len(best.results), best.winner.name
        (2, 'best.yaml')
    """
    file, shared = Path(config), list_overrides(overrides)
    if isinstance(grid, Mapping):
        encode = partial(json.dumps, default=str)
        lists = {key: [values] if isinstance(values, str) else map(encode, values) for key, values in grid.items()}
        grid = [f"{key}={','.join(values)}" for key, values in lists.items()]
    study = Study.load(file, shared)
    base = study.config
    if not base.task.config.split.validation:
        raise ConfigError(
            "sweep chooses on validation examples, but task.split.validation is 0; add --set task.split.validation=0.1"
        )
    folder = Path(out) if out else Path("runs") / f"{base.name}-sweep"
    # Two sweeps on one folder would each rank the runs of both.
    with RunFolder(folder).claim():
        settings = expand_grid(grid, partial(keep_known_settings, folder=study.folder))
        trials = [Trial(own, seed) for own in settings for seed in range(base.seed, base.seed + seeds)]
        # All settings are checked before the first run starts.
        pending = [trial for trial in trials if not _is_finished(_load(file, shared, trial), folder / trial.folder)]
        observer.say(f"{len(trials)} runs, {len(trials) - len(pending)} of them finished; folder: {folder}")
        ended = {trial: _run_trial(_load(file, shared, trial), trial, folder, observer) for trial in pending}
        failures = {trial: reason for trial, reason in ended.items() if reason}
        results = {
            trial: json.loads((folder / trial.folder / SUMMARY).read_text(encoding="utf-8"))
            for trial in trials
            if trial not in failures
        }
        if not results:
            first, reason = next(iter(failures.items()))
            raise ConfigError(f"no run of the sweep finished; {first.label}: {reason}")
        ranked, metric = rank_settings(results, failures), dict(next(iter(results.values()))["metric"])
        methods = tuple(_compare_methods(ranked, metric["name"], folder, observer))
        result = Sweep(folder, tuple(ranked), metric, find_unequal_validation(ranked), methods)
        if result.warning:
            observer.warn(result.warning)
        _write(result, file, shared)
        return result


def _compare_methods(
    ranked: Sequence[SettingsResult], metric: str, folder: Path, observer: Observer
) -> Iterator[dict[str, Any]]:
    """Yield each method with its best settings, and its paired difference from the first one on the test subjects."""
    best = find_best_of_methods(ranked)
    if len(best) < 2:
        return
    runs = [folder / Trial(result.settings, seed).folder for result in best.values() for seed in result.validation]
    # Say nothing about baselines: those lines belong to a report.
    groups = compare_runs(runs, observer=SILENT)["groups"]
    if len(groups) != len(best):
        observer.note("the methods are not compared on test subjects: their runs differ in more than the method")
        return
    # A metric of the subjects of all sites at once differs from the mean of the sites', and has a name of its own.
    paired = next((name for name in (metric, f"{metric}_across_sites") if name in groups[0]), metric)
    for (name, result), group in zip(best.items(), groups, strict=True):
        difference = group.get("differences", {}).get(groups[0]["label"], {}).get(paired)
        row = {"method": name, "settings": list(result.settings), "bytes": result.bytes, "metric": paired}
        yield {**row, "value": group.get(paired), "difference": difference}


def _run_trial(study: Study, trial: Trial, folder: Path, observer: Observer) -> str | None:
    """Run a trial, or resume it, say a line about it, and return why it failed; None if it did not."""
    out = folder / trial.folder
    out.mkdir(parents=True, exist_ok=True)
    # Write them before the run, so that a later sweep with other settings notices a run that failed, too.
    (out / CONFIG).write_text(dump_config(study.config), encoding="utf-8")
    try:
        result = RunFolder(out, resume=RunFolder(out).has_checkpoint)
        with result.claim():
            summary = launch("local", study, result, SILENT).summary
    except FlareSparseError as error:
        reason = f"{error.code}: {error}"
    except (MemoryError, OSError, RuntimeError) as error:
        # The machine (torch's lack of memory) or the user's own code has failed: the same command tries again.
        _LOG.warning("%s failed", trial.label, exc_info=True)
        reason = describe_exception(error)
    else:
        name = summary["metric"]["name"]
        value = summary["final"]["metrics"].get(f"{VALIDATION}{name}")
        shown = "-" if value is None else f"{value:.4g}"
        observer.say(f"{trial.folder}: validation {name} {shown}, {summary['seconds']:.0f} s")
        return None
    observer.say(f"{trial.label} failed: {reason}")
    return reason


def _load(file: Path, overrides: list[str], trial: Trial) -> Study:
    study = Study.load(file, [*overrides, *trial.settings, f"seed={trial.seed}"])
    # Runs in this process are the same however the study is deployed later.
    return replace(study, config=study.config.model_copy(update={"deployment": DeploymentConfig()}))


def _is_finished(study: Study, out: Path) -> bool:
    """Return whether a folder holds the finished run of a study.

    Raises:
        ConfigError: it holds a run of other settings, finished or not.
    """
    started = out / CONFIG
    if started.is_file() and started.read_text(encoding="utf-8") != dump_config(study.config):
        raise ConfigError(f"{out}: holds a run of other settings than this sweep; choose another --out")
    return RunFolder(out).is_finished


def _write(sweep: Sweep, file: Path, overrides: list[str]) -> None:
    """Write the record, the configuration with the settings that won, and the figure, if matplotlib is installed."""
    ranked, metric, folder = sweep.results, sweep.metric, sweep.path
    best, unit = ranked[0], metric["unit"]
    rows = [{**asdict(result), "mean": result.mean, "deviation": result.deviation} for result in ranked]
    record = {"metric": metric, "config": str(file), "overrides": overrides, "results": rows, "warning": sweep.warning}
    write_json(folder / RECORD, {**record, "methods": list(sweep.methods)})
    won = f"{folder.name} of {len(ranked)} settings with {len(best.validation)} seeds: {', '.join(best.settings)}."
    lines = [
        f"# Settings that won {won}",
        f"# {metric['name']} on validation examples, mean over the seeds: {best.mean:.4g} {unit}".rstrip(),
        *(f"# seed {seed} has no result with these settings" for seed in best.failed),
        *([f"# {sweep.warning}"] if sweep.warning else []),
    ]
    winner = Study.load(file, [*overrides, *best.settings])
    copy_user_code(winner.user_code, folder)
    (folder / WINNER).write_text("\n".join(lines) + "\n" + dump_config(winner.config), encoding="utf-8")
    try:
        from ..results.report.figures import draw_sweep, render_png
    except ImportError:
        return
    label = f"{metric['name']} ({unit})" if unit else metric["name"]
    (folder / FIGURE).write_bytes(render_png(draw_sweep, (list(ranked), sweep.methods, label)))
