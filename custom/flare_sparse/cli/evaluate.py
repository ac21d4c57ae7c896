"""``flare-sparse evaluate``: evaluate the models of finished runs on data at hand, without a federation."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ..config.assemble import Assembly
from ..config.schema import RunConfig
from ..core.checkpoint.writing import write_json
from ..core.errors import ConfigError, DataError
from ..core.params import compute_digest
from ..core.seeds import limit_threads
from ..methods.method import Method, describe_site_model
from ..results.report.card import write_card
from ..results.runs.evaluation import Cohort, Split
from ..results.runs.folder import SUMMARY
from ..results.runs.load import load_assembly
from ..results.runs.models import list_run_models, read_run_model
from ..results.runs.results import CROSS_SITE_FILE, EVALUATIONS, RunResult
from ..tasks.task import Metric, SiteData
from .console import out as console
from .sites import prepare_site_data


def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="Result folders of finished runs", show_default=False)],
    data: Annotated[
        Path | None, typer.Option(help="Data to evaluate on: the folder or file that a site file would name")
    ] = None,
    split: Annotated[Split, typer.Option(help="Examples to use: all, or those of one part of the run's split")] = "all",
    best: Annotated[
        bool, typer.Option("--best", help="Evaluate the best model on validation examples instead of the final one")
    ] = False,
    site_model: Annotated[
        str | None,
        typer.Option(metavar="SITE", help="Evaluate a site's own model instead (of local_only, for one)"),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the cohort in file, table and report; default: that of the data"),
    ] = None,
    matrix: Annotated[
        bool,
        typer.Option("--matrix", help="Evaluate every model at every simulated site's test examples instead"),
    ] = False,
    resamples: Annotated[int, typer.Option(min=0, help="Resamples of the bootstrap intervals; 0: no intervals")] = 1000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier evaluation of this name")] = False,
) -> None:
    """Evaluate a run's model on the data of a hospital that took no part, or every model of a run at every site.

    The run's own task loads and preprocesses the data with the run's settings, and computes all its metrics, with
    95 % bootstrap intervals over the examples. Writes RUN/evaluations/NAME.json, which flare-sparse report shows.
    Nothing leaves this machine.

    Examples:

        flare-sparse evaluate runs/neurosfl_brain_age --data /data/new_hospital

        flare-sparse evaluate runs/neurosfl_brain_age --data /data/new_hospital --best --json

        flare-sparse evaluate runs/neurosfl_brain_age runs/local_only_brain_age --matrix
    """
    _check_options(data, matrix=matrix, best=best, site_model=site_model)
    results = []
    for run in runs:
        assembly, config = _load_run(run)
        model, file = site_model or ("best" if best else "final"), run / EVALUATIONS / CROSS_SITE_FILE
        with limit_threads(config.torch_threads):
            if data is None:
                result = evaluate_matrix(run, assembly, config)
            else:
                cohort = _check_name(name or data.resolve().name.split(".")[0])
                file = _choose_file(run, cohort, model, overwrite=overwrite)
                result = evaluate_cohort(run, assembly, SiteData(cohort, data.resolve()), split, model, resamples)
        file.parent.mkdir(exist_ok=True)
        write_json(file, result)
        write_card(RunResult.read(run))
        results.append(result)
        if not as_json:
            (_show if data else _show_matrix)(result, assembly.task.metric)
            console.print(f"record: {file}", markup=False)
    if as_json:
        console.print(json.dumps(results[0] if len(results) == 1 else results, indent=2), markup=False)


def _choose_file(run: Path, cohort: str, model: str, *, overwrite: bool) -> Path:
    """Raises:
    ConfigError: the file exists and may not be replaced.
    """
    file = run / EVALUATIONS / f"{cohort}{'' if model == 'final' else f'-{model}'}.json"
    if file.exists() and not overwrite:
        raise ConfigError(f"{file}: exists already; add --overwrite to replace it, or choose another --name")
    return file


def evaluate_cohort(
    run: Path, assembly: Assembly, data: SiteData, split: Split, model: str, resamples: int
) -> dict[str, Any]:
    """Evaluate one model of a run on one cohort and return the record.

    Raises:
        ConfigError: the run has no such model.
        DataError: the data cannot be loaded or has no examples, or the model cannot be applied to it.
    """
    weights = read_run_model(run, assembly, model)
    cohort = Cohort(assembly, data, split)
    if not cohort.size:
        raise DataError(f"{data.path}: there are no {'' if split == 'all' else f'{split} '}examples to evaluate on")
    result = asdict(cohort.evaluate(weights, resamples))
    note = _describe_model(assembly.method, model)
    return {
        "run": run.resolve().name,
        "run_id": assembly.run_id,
        "model": model,
        "model_sha256": compute_digest(weights),
        "cohort": data.site,
        "data": str(data.path),
        "split": split,
        "resamples": resamples,
        **result,
        "notes": [note, *result["notes"]] if note else list(result["notes"]),
    }


def evaluate_matrix(run: Path, assembly: Assembly, config: RunConfig) -> dict[str, Any]:
    """Evaluate every model of a run at every simulated site's test examples and return the record.

    Raises:
        ConfigError: the run has no simulator section, so the sites' data is not on this machine.
    """
    if config.simulator is None:
        raise ConfigError(
            f"{run}: --matrix needs the data of all sites on this machine, but config.yaml has no simulator section; "
            "evaluate at each site with --data"
        )
    names = list_run_models(run, assembly)
    if not names:
        read_run_model(run, assembly, "final")
    weights = {name: read_run_model(run, assembly, name) for name in names}
    sites = prepare_site_data(config, assembly.task, run)
    examples, results = {}, {}
    for site, data in sites.items():
        cohort = Cohort(assembly, data, "test")
        examples[site] = cohort.size
        results[site] = {name: cohort.evaluate(weights[name]).metrics if cohort.size else {} for name in names}
    return {
        "run": run.resolve().name,
        "run_id": assembly.run_id,
        "split": "test",
        "metric": asdict(assembly.task.metric),
        "personal_model": describe_site_model(assembly.method.config),
        "examples": examples,
        "results": results,
    }


def _check_options(data: Path | None, *, matrix: bool, best: bool, site_model: str | None) -> None:
    """Raises:
    ConfigError: the options exclude each other.
    DataError: the data does not exist.
    """
    if (data is None) != matrix:
        raise ConfigError(
            "--matrix evaluates at the simulated sites; leave --data out"
            if matrix
            else "--data is missing: give the folder or file to evaluate on, or --matrix for the sites of the run"
        )
    if best and site_model:
        raise ConfigError("--best and --site-model exclude each other; leave one out")
    if data is not None and not data.exists():
        raise DataError(f"--data {data}: there is no file or folder of this name; correct the path")


def _load_run(run: Path) -> tuple[Assembly, RunConfig]:
    if not (run / SUMMARY).is_file():
        raise ConfigError(f"{run}: no summary.json; expected the result folder of a finished flare-sparse run")
    return load_assembly(run)


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
        raise ConfigError(f"--name {name!r}: expected letters, digits, '-', '_' and '.', because it names a file")
    if f"{name}.json" == CROSS_SITE_FILE:
        raise ConfigError(f"--name {name}: reserved for --matrix; choose another name")
    return name


def _describe_model(method: Method[Any, Any], model: str) -> str:
    """Return what was evaluated, where the metrics of the run are of other models."""
    if not describe_site_model(method.config) or model not in ("final", "best"):
        return ""
    can_adapt = bool(method.config.personal) or type(method).adapt is not Method.adapt
    hint = "; flare-sparse adapt RUN --data DIR adapts and evaluates it" if can_adapt else ""
    return (
        f"{method.name}: this is the run's common model. The final metrics of the run are of each site's own model, "
        f"{describe_site_model(method.config)}{hint}"
    )


def _show(result: dict[str, Any], metric: Metric) -> None:
    of_split = "" if result["split"] == "all" else f" {result['split']}"
    skipped = f", {result['skipped']} skipped" if result["skipped"] else ""
    examples = f"{result['examples']}{of_split} examples{skipped}"
    title = f"{result['run']}: {_format_model(result['model'])} on {result['cohort']}, {examples}"
    table = Table(title=title, title_justify="left")
    for column in ("metric", "value", "95 % interval"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in _order_metrics(result["metrics"], metric):
        bounds = result["intervals"].get(name)
        interval = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "-"
        table.add_row(_label_metric(name, metric), f"{result['metrics'][name]:.3f}", interval)
    console.print(table)
    for note in result["notes"]:
        console.print(note, markup=False)


def _show_matrix(record: dict[str, Any], metric: Metric) -> None:
    sites = list(record["results"])
    title = f"{record['run']}: {_label_metric(metric.name, metric)} of each model (row) on each site's test examples"
    table = Table(title=title, title_justify="left")
    table.add_column("model")
    for site in sites:
        table.add_column(f"{site}\n{record['examples'][site]}", justify="right")
    for model in record["results"][sites[0]]:
        values = [record["results"][site][model].get(metric.name) for site in sites]
        table.add_row(_format_model(model), *("-" if value is None else f"{value:.3f}" for value in values))
    console.print(table)


def _format_model(name: str) -> str:
    return f"{name} model" if name in ("final", "best") else f"model of {name}"


def _order_metrics(metrics: dict[str, float], metric: Metric) -> list[str]:
    """Return the names with the task's own metric first."""
    return sorted(metrics, key=lambda name: (name != metric.name, name))


def _label_metric(name: str, metric: Metric) -> str:
    return f"{name} ({metric.unit})" if metric.unit and name == metric.name else name
