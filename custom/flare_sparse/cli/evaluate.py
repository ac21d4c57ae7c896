"""``flare-sparse evaluate``: evaluate the models of finished runs on data at hand, without a federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cohorts.split import Part
from ..core.errors import ConfigError
from .console import JSON, Screen, build_table, print_json
from .console import out as console
from .options import ModelName, Runs

if TYPE_CHECKING:
    from ..tasks.task import Metric


def evaluate(
    runs: Runs,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Data to evaluate on: the folder or file that a site file would name; default: every model of the run "
            "at every simulated site's test examples"
        ),
    ] = None,
    split: Annotated[Part, typer.Option(help="Examples to use: all, or those of one part of the run's split")] = "all",
    model: ModelName = "final",
    name: Annotated[
        str | None,
        typer.Option(help="Name of the cohort in file, table and report; default: that of the data"),
    ] = None,
) -> None:
    """Evaluate a run's model on the data of a hospital that took no part, or every model of a run at every site.

    The run's own task loads and preprocesses the data with the run's settings, and computes all its metrics, with
    95 % bootstrap intervals over the examples. Writes RUN/evaluations/NAME.json, which flare-sparse report shows.
    Nothing leaves this machine.

    With --model adapted the model of a method that adapts, such as metagater, is adapted to 80 % of the data's examples
    and evaluated on the others, before and after. Writes the model and adaptation.json to RUN/adapted/NAME.

    Examples:

        flare-sparse evaluate runs/neurosfl_brain_age --data /data/new_hospital

        flare-sparse evaluate runs/neurosfl_brain_age --data /data/new_hospital --model best --json

        flare-sparse evaluate runs/neurosfl_brain_age runs/local_only_brain_age

        flare-sparse evaluate runs/metagater_cifar10 --data new_hospital.npz --model adapted
    """
    from ..api.run import Run
    from ..results.runs.evaluation import ADAPTATION, ADAPTED, choose_evaluation_file
    from ..results.runs.results import CROSS_SITE_FILE, EVALUATIONS

    records = []
    for folder in runs:
        run = Run(folder, Screen())
        show: Callable[[dict[str, Any], Metric], None]
        if model == "adapted":
            if data is None:
                raise ConfigError("--model adapted: name the data of the new site with --data")
            if split != "all" or name is not None:
                raise ConfigError("--model adapted: has a split and a name of its own; leave --split and --name out")
            record, show = run.adapt(data), _show_adapted
            file = folder / ADAPTED / record["site"] / ADAPTATION
        else:
            record, show = run.evaluate(data, model=model, split=split, name=name), _show if data else _show_matrix
            file = folder / EVALUATIONS / CROSS_SITE_FILE
            if data:
                file = choose_evaluation_file(folder, record["cohort"], model, overwrite=True)
        records.append(record)
        if not JSON.get():
            show(record, run.study.assembly.task.metric)
            if model == "adapted":
                console.print(f"model:  {file.with_name('model.safetensors')}")
            console.print(f"record: {file}")
    print_json(records[0] if len(records) == 1 else records)


def _show_adapted(figures: dict[str, Any], metric: Metric) -> None:
    rows = [
        [_label_metric(name, metric), f"{figures['before'][name]:.3f}", f"{after:.3f}"]
        for name, after in sorted(figures["after"].items())
    ]
    console.print(build_table(f"{figures['method']} at {figures['site']}", ("", "before", "after"), rows))
    console.print(
        f"{figures['training_examples']} training examples, {figures['adaptation_seconds']:.2f} s; "
        f"{figures['sparsity']:.1%} of the weights are zero"
    )


def _show(result: dict[str, Any], metric: Metric) -> None:
    from ..results.report.tables import label_model

    of_split = "" if result["split"] == "all" else f" {result['split']}"
    skipped = f", {result['skipped']} skipped" if result["skipped"] else ""
    examples = f"{result['examples']}{of_split} examples{skipped}"
    title = f"{result['run']}: {label_model(result['model'])} on {result['cohort']}, {examples}"
    rows = []
    # Show the task's own metric first.
    for name in sorted(result["metrics"], key=lambda name: (name != metric.name, name)):
        bounds = result["intervals"].get(name)
        interval = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "-"
        rows.append([_label_metric(name, metric), f"{result['metrics'][name]:.3f}", interval])
    console.print(build_table(title, ("metric", "value", "95 % interval"), rows))
    for note in result["notes"]:
        console.print(note)


def _show_matrix(record: dict[str, Any], metric: Metric) -> None:
    from ..results.report.tables import label_model

    sites = list(record["results"])
    title = f"{record['run']}: {_label_metric(metric.name, metric)} of each model (row) on each site's test examples"
    rows = []
    for model in record["results"][sites[0]]:
        values = [record["results"][site][model].get(metric.name) for site in sites]
        rows.append([label_model(model), *("-" if value is None else f"{value:.3f}" for value in values)])
    console.print(build_table(title, ["model", *(f"{site}\n{record['examples'][site]}" for site in sites)], rows))


def _label_metric(name: str, metric: Metric) -> str:
    return f"{name} ({metric.unit})" if metric.unit and name == metric.name else name
