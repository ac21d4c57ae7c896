"""``flare-sparse report``: figures, tables and one page of one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from .console import out as console


def report(
    runs: Annotated[list[Path], typer.Argument(help="result folders of flare-sparse run or rehearse")],
    out: Annotated[
        Path | None, typer.Option(help="folder to write; default: report/ in the first result folder")
    ] = None,
) -> None:
    """Draw one run, or several side by side: quality, bytes, sites, sparsity; as PNG and as one page that opens offline.

    Runs of fedavg and local_only among them are what the others are compared with.

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
    read = read_runs(runs)
    folder = out or runs[0] / "report"
    for path in [*write_report(read, folder), *(write_card(run) for run in read)]:
        console.print(str(path), markup=False, soft_wrap=True)
