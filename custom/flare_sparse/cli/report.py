"""``flare-sparse report``: draw figures, tables and a page of one or several runs, or print their figures as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import ConfigError
from ..results.runs.comparison import describe_runs
from ..results.runs.results import read_runs
from .console import err
from .console import out as console
from .predictions import ensure_pictures, ensure_predictions


def report(
    runs: Annotated[list[Path], typer.Argument(help="Result folders of flare-sparse run", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: report/ in the first result folder")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print metrics, baselines and paired differences as JSON; write no page")
    ] = False,
    baselines: Annotated[
        bool,
        typer.Option(
            "--baselines/--no-baselines",
            help="Compare with trivial baselines, if the sites' data is on this machine: site mean, linear models",
        ),
    ] = True,
    pictures: Annotated[
        bool,
        typer.Option(
            "--pictures/--no-pictures",
            help="Show the best, median and worst case of every site, of a segmentation whose data is on this machine",
        ),
    ] = True,
) -> None:
    """Draw quality, bytes, sites and sparsity of one or several runs, as PNG files and as a page that opens offline.

    Runs of fedavg and local_only serve as baselines for the others. Beside every run stand trivial baselines: the mean
    of each site, and a ridge or logistic regression of each site alone and of all sites pooled, with paired differences
    on the same test subjects. They need the sites' data on this machine and the extra baselines; they are computed
    once and kept in RUN/evaluations. Runs that differ by seed and fold only are taken together.

    [dim]flare-sparse report runs/neurosfl_brain_age runs/fedavg_brain_age --out report[/]

    [dim]flare-sparse report runs/fold-1 runs/fold-2 --json[/]
    """
    if as_json and out is not None:
        raise ConfigError("--json prints and writes no page; leave --out out")
    results = read_runs(runs)
    notes = {run.label: note for run in results if baselines and (note := ensure_predictions(run))}
    # Read again: the predictions that were just written belong to the record.
    results = read_runs(runs)
    if pictures and not as_json:
        for run in results:
            ensure_pictures(run)
    if as_json:
        console.print(json.dumps(describe_runs(results, notes), indent=2), markup=False, soft_wrap=True)
        return
    try:
        from ..results.report.card import write_card
        from ..results.report.page import write_report
    except ImportError as error:
        raise ConfigError(
            f"report needs matplotlib and jinja2: pip install 'flare-sparse[report]' ({error.name})"
        ) from error
    for label, note in notes.items():
        err.print(f"{label}: no baselines: {note}", markup=False, soft_wrap=True)
    folder = out or runs[0] / "report"
    for path in [*write_report(results, folder, pictures=pictures), *(write_card(run) for run in results)]:
        console.print(str(path), markup=False, soft_wrap=True)
