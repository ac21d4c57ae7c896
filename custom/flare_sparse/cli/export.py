"""``flare-sparse export``: configurations to FLARE job folders."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated

import typer

from ..config import load_config


def export(
    configs: Annotated[list[Path], typer.Argument(help="configuration files")],
    out: Annotated[Path, typer.Option(help="folder that receives a job folder per configuration")] = Path("jobs"),
    byoc: Annotated[
        bool, typer.Option("--byoc", help="send the package's source along (sites need not install it)")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="write nothing; fail if a job folder is out of date")] = False,
) -> None:
    """Write FLARE job folders, ready for submit_job.

    By default no code travels: every site has the wheel installed and allows its classes

    Examples:

        flare-sparse export app_configs/*.yaml

        flare-sparse export app_configs/*.yaml --check
    """
    from ..flare.export import differences, export_job  # FLARE takes seconds to import

    stale: list[str] = []
    for file in configs:
        config = load_config(file)
        with contextlib.redirect_stdout(io.StringIO()):
            if check:
                stale += differences(config, out)
            else:
                export_job(config, out, "byoc" if byoc else "installed")
        if not check:
            typer.echo(f"{out / config.name}")
    if stale:
        typer.echo("out of date; run: flare-sparse export " + " ".join(map(str, configs)), err=True)
        for line in stale:
            typer.echo(f"  {line}", err=True)
        raise typer.Exit(1)
