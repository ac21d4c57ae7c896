"""``flare-sparse export``: write FLARE job folders from configurations."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides

_INSTALLED = (
    "  {path} is not part of the job: install {module} at every site and run there "
    "flare-sparse site allow KIT --also {path}, or export with --byoc"
)

_BUNDLE = (
    "  {classes}: code of the bundle's own, which is not part of the job: sites that allow code take it with "
    "export --byoc; every other site refuses the job"
)


def export(
    configs: Annotated[list[Path], typer.Argument(help="Configuration files", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder that receives one job folder per configuration")] = Path("jobs"),
    set_: Overrides = None,
    byoc: Annotated[
        bool,
        typer.Option(
            "--byoc/--installed",
            help="Send the package's source with the job, or rely on the wheel that every site has installed",
        ),
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a job folder is out of date")] = False,
) -> None:
    """Write FLARE job folders for submit_job.

    By default no code travels: every site has installed the wheel and allows its classes.

    Examples:

        flare-sparse export app_configs/*.yaml

        flare-sparse export app_configs/*.yaml --check

        flare-sparse export dose.yaml --byoc --set federation.min_sites=2
    """
    from ..config.loading import load_config
    from ..config.user_tasks import list_user_code
    from ..flare.export import export_job, find_outdated_files

    stale: list[str] = []
    for file in configs:
        config = load_config(file, set_ or ())
        with contextlib.redirect_stdout(io.StringIO()):
            # A script always travels: it is no class, which a site could have installed and allowed.
            travels = byoc or config.task.key == "script"
            modules = list_user_code(config, file.parent) if travels else ()
            if check:
                stale += find_outdated_files(config, out, modules)
            else:
                export_job(config, out, "byoc" if byoc else "installed", modules)
        if not check:
            typer.echo(f"{out / config.name}")
            if (code := getattr(config.task.config, "code", ())) and not byoc:
                typer.echo(_BUNDLE.format(classes=", ".join(code)), err=True)
            for path in [part.name for part in (config.method, config.task) if part.key == "class" and not byoc]:
                typer.echo(_INSTALLED.format(path=path, module=path.rpartition(".")[0]), err=True)
    if stale:
        typer.echo("job folders are out of date; run: flare-sparse export " + " ".join(map(str, configs)), err=True)
        for line in stale:
            typer.echo(f"  {line}", err=True)
        raise typer.Exit(1)
