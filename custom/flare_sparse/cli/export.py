"""``flare-sparse export``: write FLARE job folders from configurations."""

import contextlib
import io
from pathlib import Path
from typing import Annotated

import typer

from .options import Overrides

_INSTALLED = (
    "  {path} is not part of the job: install {module} at every site and run there "
    "flare-sparse site setup KIT --also {path}, or export with --set deployment.packaging=byoc"
)

_BUNDLE = (
    "  {classes}: code of the bundle's own, which is not part of the job: sites that allow code take it with "
    "--set deployment.packaging=byoc; every other site refuses the job"
)


def export(
    configs: Annotated[list[Path], typer.Argument(help="Configuration files")],
    out: Annotated[Path, typer.Option(help="Folder that receives one job folder per configuration")] = Path("jobs"),
    set_: Overrides = None,
) -> None:
    """Write FLARE job folders for submit_job.

    By default no code travels: every site has installed the wheel and allows its classes. With deployment.packaging:
    byoc the package's source is part of the job.

    Examples:

        flare-sparse export app_configs/*.yaml

        flare-sparse export dose.yaml --set deployment.packaging=byoc
    """
    from ..config.loading import load_config
    from ..config.user_classes import list_user_code
    from ..config.yaml_files import find_configuration
    from ..flare.recipe import export_job

    for file in configs:
        file = find_configuration(file)  # noqa: PLW2901, the same file by its full name
        config = load_config(file, set_ or ())
        with contextlib.redirect_stdout(io.StringIO()):
            byoc = config.deployment.packaging == "byoc"
            # A script always travels: it is no class, which a site could have installed and allowed.
            travels = byoc or config.task.key == "script"
            modules = list_user_code(config, file.parent) if travels else ()
            export_job(config, out, modules)
        typer.echo(f"{out / config.name}")
        if (code := getattr(config.task.config, "code", ())) and not byoc:
            typer.echo(_BUNDLE.format(classes=", ".join(code)), err=True)
        for path in [part.name for part in (config.method, config.task) if part.key == "class" and not byoc]:
            typer.echo(_INSTALLED.format(path=path, module=path.rpartition(".")[0]), err=True)
