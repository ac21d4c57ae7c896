"""The command line ``flare-sparse``: one module per command, registered here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from .adapt import adapt
from .audit import audit
from .bench import bench
from .check import check
from .console import Commands, join_lines
from .console import out as console
from .decrypt import decrypt
from .estimate import estimate
from .evaluate import evaluate
from .evidence import evidence
from .export import export
from .fetch_model import fetch_model
from .methods import methods
from .phantom import phantom
from .predict import predict
from .report import report
from .run import run
from .save import save
from .site import site
from .sweep import sweep
from .tasks import tasks
from .watch import watch

app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False
)
for command in (
    run, watch, report, evaluate, predict, audit, evidence, sweep, bench, adapt, check, estimate, export, save, decrypt,
    fetch_model, methods, tasks, phantom,
):  # fmt: skip
    app.command()(command)
app.add_typer(site, name="site")
for info in (*app.registered_commands, *site.registered_commands):
    info.help = join_lines(info.callback.__doc__ or "")


def _show_version(requested: bool) -> None:
    if requested:
        console.print(f"flare-sparse {version('flare-sparse')}")
        raise typer.Exit


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit")
    ] = False,
) -> None:
    """Train one model over many sites with NVIDIA FLARE and send only what matters.

    [bold]Start[/]   flare-sparse run app_configs/neurosfl_brain_age.yaml
    [bold]Change[/]  flare-sparse run app_configs/neurosfl_brain_age.yaml --set method.sparsity=0.98
    [bold]Choose[/]  flare-sparse methods, flare-sparse tasks, then a file in app_configs/
    [bold]Follow[/]  flare-sparse watch RUN shows the rounds and the time left
    [bold]Check[/]   flare-sparse estimate CONFIG counts bytes, flare-sparse check CONFIG finds mistakes; neither trains
    """
