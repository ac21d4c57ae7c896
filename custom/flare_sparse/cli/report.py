"""``flare-sparse report``: draw figures, tables and a page of one or several runs, or print their figures as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..core.errors import ConfigError
from .console import build_table, err
from .console import out as console
from .options import JSON
from .screen import Screen

if TYPE_CHECKING:
    from ..results.runs.exchanges import JobExchange, Traffic


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Result folders of flare-sparse run; or FLARE's workspaces or downloaded jobs with a sparse exchange",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: report/ in the first result folder")
    ] = None,
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Leave out what needs the sites' data: trivial baselines, and figures of single subjects",
        ),
    ] = False,
) -> None:
    """Draw quality, bytes, sites and sparsity of one or several runs, as PNG files and as a page that opens offline.

    Runs of fedavg and local_only serve as baselines for the others. Beside every run stand trivial baselines: the mean
    of each site, and a ridge or logistic regression of each site alone and of all sites pooled, with paired differences
    on the same test subjects. They need the sites' data on this machine and the extra baselines; they are computed
    once and kept in RUN/evaluations. Runs that differ by seed and fold only are taken together.

    [dim]flare-sparse report runs/neurosfl_brain_age runs/fedavg_brain_age --out report[/]

    Of a FLARE job with a sparse exchange, in the workspace of the simulator or downloaded, the bytes are printed by
    site and round, beside those of whole models and FLARE's metrics.

    [dim]flare-sparse report runs/fold-1 runs/fold-2 --json[/]

    [dim]flare-sparse report workspace[/]
    """
    from ..api.report import compare_runs, write_reports
    from ..results.runs.exchanges import has_exchanges

    as_json = JSON.get()
    if as_json and out is not None:
        raise ConfigError("--json prints and writes no page; leave --out out")
    if any(map(has_exchanges, runs)):
        _report_exchanges(runs, out, as_json=as_json)
        return
    if as_json:
        figures = compare_runs(runs, baselines=not plain, observer=Screen())
        console.print(json.dumps(figures, indent=2), markup=False, soft_wrap=True)
        return
    for path in write_reports(runs, out, baselines=not plain, pictures=not plain, observer=Screen(err)):
        console.print(str(path), markup=False, soft_wrap=True)


def _report_exchanges(folders: list[Path], out: Path | None, *, as_json: bool) -> None:
    """Print what FLARE's jobs with a sparse exchange sent.

    Raises:
        ConfigError: a folder holds none, or a page is asked for.
    """
    from ..results.runs.exchanges import has_exchanges, read_exchanges
    from ..results.runs.progress import compare_with_dense, format_bytes

    if out is not None:
        raise ConfigError("--out: a job of FLARE's own recipes has figures only, which are printed; leave --out out")
    if others := [folder for folder in folders if not has_exchanges(folder)]:
        raise ConfigError(f"{others[0]}: no sparse_exchange.jsonl below it; report result folders by themselves")
    jobs = [job for folder in folders for job in read_exchanges(folder)]
    if as_json:
        figures = {"jobs": [job.to_dict() for job in jobs]}
        console.print(json.dumps(figures, indent=2), markup=False, soft_wrap=True)
        return
    for job in jobs:
        console.print(_build_table(job, "site", job.sites))
        console.print(_build_table(job, "round", {number + 1: row for number, row in job.rounds.items()}))
        total = job.total
        saved = compare_with_dense(total.sent, total.dense) if total.dense else "no model was sent"
        console.print(
            f"{job.name}: {format_bytes(total.sent)} in {total.messages} messages instead of "
            f"{format_bytes(total.dense)}, {saved}",
            markup=False,
        )


def _build_table(job: JobExchange, label: str, rows: Mapping[str, Mapping[str, Traffic]] | Mapping[int, Any]) -> Table:
    """Return the traffic of each site, or of each round with FLARE's metrics."""
    from ..results.runs.exchanges import Traffic
    from ..results.runs.progress import compare_with_dense, format_bytes

    names = sorted({name for found in job.metrics.values() for name in found}) if label == "round" else []
    lines = []
    for row, traffic in rows.items():
        down, up = (traffic.get(direction, Traffic()) for direction in ("down", "up"))
        both = down + up
        compared = compare_with_dense(both.sent, both.dense).removesuffix(" than dense") if both.dense else "-"
        metrics = job.metrics.get(int(row) - 1, {}) if names else {}
        figures = [f"{metrics[name]:.4g}" if name in metrics else "-" for name in names]
        sizes = [format_bytes(size) for size in (down.sent, down.dense, up.sent, up.dense)]
        lines.append([str(row), *sizes, compared, *figures])
    columns = (label, "to sites", "whole models", "from sites", "whole models", "compared", *names)
    return build_table(f"{job.name}: bytes by {label}", columns, lines)
