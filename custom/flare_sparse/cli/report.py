"""``flare-sparse report``: draw figures, tables and a page of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .console import out as console


def report(
    runs: Annotated[list[Path], typer.Argument(help="Result folders of flare-sparse run", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: report/ in the first result folder")
    ] = None,
) -> None:
    """Draw quality, bytes, sites and sparsity of one or several runs, as PNG files and as a page that opens offline.

    Runs of fedavg and local_only serve as baselines for the others.

    [dim]flare-sparse report runs/neurosfl_brain_age runs/fedavg_brain_age --out report[/]
    """
    try:
        from ..report.card import write_card
        from ..report.page import write_report
        from ..runs.results import read_runs
    except ImportError as error:
        raise ConfigError(
            f"report needs matplotlib and jinja2: pip install 'flare-sparse[report]' ({error.name})"
        ) from error
    results = read_runs(runs)
    folder = out or runs[0] / "report"
    for path in [*write_report(results, folder), *(write_card(run) for run in results)]:
        console.print(str(path), markup=False, soft_wrap=True)
