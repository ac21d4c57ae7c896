"""Command-line options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path,
    typer.Argument(help="Configuration file, or the name of one of the package's own, such as neurosfl_brain_age"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY.PATH=VALUE", help="Override a setting, such as method.sparsity=0.95; repeatable"
    ),
]
AdminKit = Annotated[
    Path | None,
    typer.Option(help="Startup kit of an admin of a running federation; default: this machine"),
]
Out = Annotated[Path | None, typer.Option(help="What to write; the text above names the default")]
Runs = Annotated[list[Path], typer.Argument(help="Result folders of finished runs")]
ModelName = Annotated[
    str,
    typer.Option(
        metavar="final|best|SITE",
        help="Which of the run's models: the last one, the best on validation examples, or a site's own",
    ),
]
