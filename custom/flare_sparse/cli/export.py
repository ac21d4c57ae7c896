"""``flare-sparse export``: configurations to FLARE job folders."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated

import typer

from ..config import load_config
from .run import own_modules

_INSTALLED = (
    "  {task} is your own and does not travel: install {module} at every site, and there: "
    "flare-sparse site allow KIT --also {task} (or send it along: --byoc)"
)


def export(
    configs: Annotated[list[Path], typer.Argument(help="configuration files")],
    out: Annotated[Path, typer.Option(help="folder that receives a job folder per configuration")] = Path("jobs"),
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, as often as needed")] = None,
    byoc: Annotated[
        bool,
        typer.Option("--byoc/--installed", help="send the package's source along, or not: sites have installed it"),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="write nothing; fail if a job folder is out of date")] = False,
) -> None:
    """Write FLARE job folders, ready for submit_job.

    By default no code travels: every site has the wheel installed and allows its classes.

    Examples:

        flare-sparse export app_configs/*.yaml

        flare-sparse export app_configs/*.yaml --check

        flare-sparse export dose.yaml --byoc --set federation.min_sites=2
    """
    from ..flare.export import export_job, find_differences  # FLARE takes seconds to import

    stale: list[str] = []
    for file in configs:
        config = load_config(file, set_ or ())
        with contextlib.redirect_stdout(io.StringIO()):
            if check:
                stale += find_differences(config, out)
            else:
                modules = own_modules(config, file) if byoc else ()
                export_job(config, out, "byoc" if byoc else "installed", modules)
        if not check:
            typer.echo(f"{out / config.name}")
            if config.task.key == "class" and not byoc:
                typer.echo(
                    _INSTALLED.format(task=config.task.name, module=config.task.name.rpartition(".")[0]), err=True
                )
    if stale:
        typer.echo("out of date; run: flare-sparse export " + " ".join(map(str, configs)), err=True)
        for line in stale:
            typer.echo(f"  {line}", err=True)
        raise typer.Exit(1)
