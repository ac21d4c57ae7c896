"""The command line ``flare-sparse``: one module per command.

Its function imports what takes seconds, such as torch, so that --help does not wait for it.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ..core.errors import ConfigError, FlareSparseError
from .console import JSON, join_lines, print_error
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


class _Commands(TyperGroup):
    """Group of all commands; an error of this package, or of a path, ends a command with the error's text."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, sorted(args, key=lambda word: word != "--json"))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if JSON.get() and args[0] not in HAVE_JSON and " ".join(args[:2]) not in HAVE_JSON:
            raise ConfigError(f"--json: it is for {', '.join(HAVE_JSON)}; leave it out")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except FlareSparseError as error:
            print_error(error)
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
        except (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError) as error:
            # A path of the command line that is a file, a folder or somebody else's; no command asks beforehand.
            if error.filename is None:
                raise
            print_error(ConfigError(f"{error.filename}: {error.strerror}; name another path, or change its rights"))
            raise typer.Exit(2) from error


app = typer.Typer(cls=_Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_enable=False)
for _panel, _names in GROUPS.items():
    for _name in _names:
        # Not imported by name: that would hide the module behind its function.
        _command = getattr(import_module(f".{_name}", __package__), _name)
        if isinstance(_command, typer.Typer):
            for _info in _command.registered_commands:
                _info.help = join_lines(_info.callback.__doc__ or "")
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(rich_help_panel=_panel, help=join_lines(_command.__doc__))(_command)


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
