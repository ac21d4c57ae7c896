"""``flare-sparse report``: draw figures, tables and a page of one or several runs, or print their figures as JSON."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.errors import ConfigError
from .console import JSON, Screen, err, print_json
from .console import out as console
from .options import Out, Runs


def report(
    runs: Runs,
    out: Out = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Leave out what needs the sites' data: trivial baselines, and figures of single subjects",
        ),
    ] = False,
) -> None:
    """Draw quality, bytes, sites and sparsity of one or several runs, as PNG files and as a page that opens offline.

    They go to the folder --out, or else to report/ in the first result folder.

    Runs of fedavg and local_only serve as baselines for the others. Beside every run stand trivial baselines: the mean
    of each site, and a ridge or logistic regression of each site alone and of all sites pooled, with paired differences
    on the same test subjects. They need the sites' data on this machine and the extra baselines; they are computed
    once and kept in RUN/evaluations. Runs that differ by seed and fold only are taken together.

    [dim]flare-sparse report runs/neurosfl_brain_age runs/fedavg_brain_age --out report[/]

    [dim]flare-sparse report runs/fold-1 runs/fold-2 --json[/]
    """
    from ..api.report import compare_runs, write_reports

    if JSON.get() and out is not None:
        raise ConfigError("--json prints and writes no page; leave --out out")
    if JSON.get():
        print_json(compare_runs(runs, baselines=not plain, observer=Screen()))
        return
    for path in write_reports(runs, out, baselines=not plain, pictures=not plain, observer=Screen(err)):
        console.print(str(path))
