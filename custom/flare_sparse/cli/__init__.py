"""The command line ``flare-sparse``: one module per command, imported when the command is called.

Its function imports what takes seconds, such as torch, so that --help does not wait for it.
"""

import ast
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ..core.errors import ConfigError
from .console import JSON, Commands, join_lines
from .console import out as console

GROUPS = {
    "Run": ("init", "check", "estimate", "plan", "run", "sweep", "export"),
    "Look": ("watch", "report", "describe", "evaluate", "predict", "audit"),
    "Share": ("save", "evidence", "withdraw"),
    "Site": ("site",),
    "Develop": ("settings", "phantom"),
}
"""Commands by what a user does with them, in the order of ``--help``."""
COMMANDS = tuple(name for names in GROUPS.values() for name in names)
HAVE_JSON = (
    *("check", "estimate", "run", "sweep", "watch", "report", "describe", "evaluate", "audit"),
    "site log",
)
"""Commands that print JSON with --json, which may stand anywhere on their line."""


class _LazyCommands(Commands):
    """Imports the module of the command that is called, and of no other: together they import torch and FLARE."""

    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands = {
            name: TyperCommand(name, rich_help_panel=group) for group, names in GROUPS.items() for name in names
        }

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, sorted(args, key=lambda word: word != "--json"))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if JSON.get() and args[0] not in HAVE_JSON and " ".join(args[:2]) not in HAVE_JSON:
            raise ConfigError(f"--json: it is for {', '.join(HAVE_JSON)}; leave it out")
        if args[0] in COMMANDS:
            self.commands[args[0]] = load_command(args[0])
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for name, command in self.commands.items():
            command.help = _read_help(name)
        super().format_help(ctx, formatter)


@cache
def load_command(name: str) -> Any:
    """Import and return a command of ``COMMANDS``, for ``site`` the group of its commands."""
    function = getattr(import_module(f".{name}", __package__), name)
    if isinstance(function, typer.Typer):
        group = function
    else:
        group = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False)
        group.command()(function)
    for info in group.registered_commands:
        info.help = join_lines(info.callback.__doc__ or "")
    return typer.main.get_command(group)


def _read_help(name: str) -> str:
    """Return a command's help without importing its module: the docstring of its function, or ``HELP``."""
    for node in ast.parse(Path(__file__).with_name(f"{name}.py").read_text("utf-8")).body:
        match node:
            case ast.FunctionDef(name=found) if found == name:
                return join_lines(ast.get_docstring(node) or "")
            case ast.Assign(targets=[ast.Name(id="HELP")], value=ast.Constant(value=str(text))):
                return text
    raise LookupError(f"cli/{name}.py has neither a function {name} nor HELP")


app = typer.Typer(
    cls=_LazyCommands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(requested: bool) -> None:
    if requested:
        console.print(f"flare-sparse {version('flare-sparse')}")
        raise typer.Exit


def _ask_json(value: bool) -> None:
    JSON.set(value)


def _trust(context: typer.Context, value: bool) -> None:
    """Let the command execute the code of result folders, until it ends."""
    if value:
        from ..config.user_code import trust_all_code

        context.with_resource(trust_all_code())


@app.callback()
def main(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit")
    ] = False,
    _json: Annotated[
        bool,
        typer.Option("--json", callback=_ask_json, help=f"Print JSON, for another program: {', '.join(HAVE_JSON)}"),
    ] = False,
    _trust_code: Annotated[
        bool,
        typer.Option(
            "--trust-code",
            callback=_trust,
            help="Execute the code in result folders, which whoever made a folder wrote; read it first",
        ),
    ] = False,
) -> None:
    """Train one model over many sites with NVIDIA FLARE and send only what matters.

    [bold]Try[/]     flare-sparse run neurosfl_brain_age
    [bold]Start[/]   flare-sparse init table --data patients.csv, then check study.yaml, run study.yaml
    [bold]Change[/]  flare-sparse run study.yaml --set method.sparsity=0.98; flare-sparse settings lists what there is
    [bold]Follow[/]  flare-sparse watch RUN shows the rounds and the time left; flare-sparse report RUN draws them
    """
