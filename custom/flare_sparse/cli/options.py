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
ModelName = Annotated[
    str,
    typer.Option(
        metavar="final|best|SITE",
        help="Which of the run's models: the last one, the best on validation examples, or a site's own",
    ),
]

StartFrom = Annotated[
    str | None,
    typer.Option(
        metavar="last|new|RUN",
        help="last: continue the interrupted run of the result folder from its last committed round. new: replace the "
        "run of the result folder. RUN, the result folder of a finished run, which is not changed: continue it up to "
        "the larger total of method.rounds, as if it had had all rounds at once; default of --out then: RUN-ROUNDS; "
        "not for --env prod, nor for methods whose schedule depends on the number of rounds",
        show_default="a new run; nothing is replaced",
    ),
]
