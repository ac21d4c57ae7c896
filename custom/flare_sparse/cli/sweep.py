"""``flare-sparse sweep``: run a configuration with several settings and seeds, and keep the settings that won."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..results.runs.progress import format_bytes
from .console import JSON, Screen, build_table, err
from .console import out as console
from .options import ConfigFile, Out, Overrides

if TYPE_CHECKING:
    from ..results.runs.sweep import SettingsResult


def sweep(
    config: ConfigFile,
    grid: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY.PATH=VALUE,...",
            help="Values of a setting to try; of several settings all combinations are run",
        ),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per setting, from the configuration's on")] = 3,
    out: Out = None,
    set_: Overrides = None,
) -> None:
    """Run a configuration with several settings, and choose by the metric on validation examples.

    All combinations of the values are run, as local runs (--env local), without FLARE, in the folder --out, or else
    runs/NAME-sweep. The same command continues an interrupted sweep: finished runs are kept, others resumed, failed
    ones too. Settings with a run without a result are ranked last. Writes a table (sweep.json), a figure (sweep.png,
    with the extra report) and the configuration with the settings that won (best.yaml). With several seeds, some test
    subjects of one seed are validation subjects of another; with --seeds 1 they choose nothing (docs/evaluation.md).

    Methods are values like others; a setting that one of them lacks is left out of its runs. The best settings of each
    are then compared on the same test subjects, with paired 95 % intervals.

    [dim]flare-sparse sweep app_configs/neurosfl_brain_age.yaml method.sparsity=0.8,0.9 --set
    task.split.validation=0.1[/]

    [dim]flare-sparse sweep app_configs/neurosfl_brain_age.yaml method.name=fedavg,neurosfl
    method.training.lr=0.01,0.03 --set task.split.validation=0.1[/]
    """
    from ..api import sweep as sweeps

    observer = Screen(err) if JSON.get() else Screen()
    result = sweeps.sweep(config, grid, set_ or (), seeds=seeds, out=out, observer=observer)
    if JSON.get():
        typer.echo((result.path / sweeps.RECORD).read_text(encoding="utf-8"))
        return
    console.print(_build_table(list(result.results), result.metric["name"]))
    if result.methods:
        console.print(_build_methods_table(result.methods))
    console.print(f"best settings: {result.winner}")


def _build_methods_table(methods: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each method with its best settings; differences are those from the first."""
    rows = []
    for row in methods:
        found = row["difference"]
        shown = f"{found['value']:+.4g} [{found['low']:+.4g}, {found['high']:+.4g}]" if found else "-"
        value = "-" if row["value"] is None else f"{row['value']:.4g}"
        rows.append([row["method"], value, shown, format_bytes(row["bytes"])])
    columns = ("method, best settings", f"test {methods[0]['metric']}", "difference [95 %]", "sent")
    return build_table(f"on the test subjects of all seeds, against {methods[0]['method']}", columns, rows)


def _build_table(ranked: list[SettingsResult], metric: str) -> Table:
    rows, has_failures = [], any(result.failed for result in ranked)
    for result in ranked:
        mean, deviation = ("-" if value is None else f"{value:.4g}" for value in (result.mean, result.deviation))
        sent = "-" if result.bytes is None else format_bytes(result.bytes)
        failed = ", ".join(f"seed {seed}" for seed in result.failed)
        rows.append([", ".join(result.settings), mean, deviation, sent, *([failed] if has_failures else [])])
    columns = ["settings", f"validation {metric}", "deviation", "sent", *(["failed"] if has_failures else [])]
    return build_table("", columns, rows)
