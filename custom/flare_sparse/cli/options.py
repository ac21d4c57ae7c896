"""Command-line options that several commands share."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

ConfigFile = Annotated[
    Path,
    typer.Argument(
        help="Configuration file, or the name of one of the package's own, such as neurosfl_brain_age",
        show_default=False,
    ),
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

JSON = ContextVar("JSON", default=False)
"""Whether the command line has --json, an option of all commands that programs read."""


Options = TypeVar("Options")


def take_options(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator of a command that takes its options as one value: a dataclass with a field for each."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        def call(**values: Any) -> None:
            command(options(**values))

        # Typer reads a command's options from its signature.
        call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        call.__name__, call.__doc__, call.__annotations__ = command.__name__, command.__doc__, hints
        return call

    return decorate


Resume = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted run in the same --out from its last committed round")
]

StepBack = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Only with --resume: discard the last N commits first and repeat their rounds. For a poisoned commit: "
        "most sites diverge from its model (E_DIVERGED, E_FINITE), or an update in it turns out to be wrong. Remove "
        "the cause first. The last two commits are kept, so one step is possible. Not for --env prod",
    ),
]

ContinueFrom = Annotated[
    Path | None,
    typer.Option(
        metavar="RUN",
        help="Continue a finished run, given by its result folder, up to the larger total of method.rounds; the result "
        "is that of a run with all rounds at once. RUN is not changed. Default of --out then: RUN-ROUNDS. Not for "
        "--env prod, and not for methods whose schedule depends on the number of rounds",
    ),
]
