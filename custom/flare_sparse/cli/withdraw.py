"""``flare-sparse withdraw``: make a finished run again without the data of subjects or of a site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import ConfigError
from .console import Screen, err
from .console import out as console

if TYPE_CHECKING:
    from ..api.withdraw import Touched


def withdraw(
    run: Annotated[Path, typer.Argument(help="Result folder of a finished run")],
    leaving: Annotated[
        str,
        typer.Argument(
            metavar="FILE|SITE",
            help="File with the identifiers of the subjects that withdraw, one a line; or name of the site that leaves",
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say which rounds the data touched; change and train nothing")
    ] = False,
    delete_models: Annotated[
        bool, typer.Option("--delete-models", help="Delete the models of RUN, which have learned from the data")
    ] = False,
) -> None:
    """Make a finished run again without subjects who withdraw, or without a site that leaves.

    Says which rounds the data touched. Deletes from RUN what holds it: checkpoints, recorded updates, predictions,
    pictures, reports, the site's own model. Then trains without it, from the last round before it where RUN still has
    that checkpoint (federation.kept_commits), else from the start. The new model has the bits of a run that never had
    the data. Needs the data of all sites on this machine; for a deployed run see docs/withdrawal.md.

    [dim]flare-sparse withdraw runs/study withdrawn.txt --dry-run[/]

    [dim]flare-sparse withdraw runs/study hospital-b --delete-models[/]
    """
    from ..api.run import Run
    from ..api.withdraw import trace_withdrawal
    from ..api.withdraw import withdraw as make_again
    from ..config.withdrawals import Withdrawals
    from ..core.names import read_names
    from ..results.runs.received import name_damage

    file = Path(leaving)
    gone = Withdrawals(read_names(file)) if file.is_file() else Withdrawals(sites=frozenset({leaving}))
    if not gone.subjects and not gone.sites:
        raise ConfigError(f"{file}: the file lists no identifier")
    finished = Run.load(run, Screen(err))
    touched = trace_withdrawal(finished, gone)
    with name_damage(run):
        for line in _describe(touched):
            console.print(line)
    if dry_run:
        return
    done = make_again(finished, gone, touched, deletes_models=delete_models, observer=Screen())
    console.print(f"new run: {done.path}; model sha256 {done.summary['model_sha256']}")


def _describe(touched: Touched) -> list[str]:
    lines = []
    for site, rounds in touched.rounds.items():
        counts = ", ".join(f"{count} in {part}" for part, count in touched.found.get(site, {}).items())
        moved = touched.moved.get(site, 0)
        lines.append(
            f"{site}{f': {counts}' if counts else ''}; rounds touched: {_format_rounds(rounds)}"
            + (
                f"; {moved} other examples change their part of the split (task.split.stable avoids it)"
                if moved
                else ""
            )
        )
    source = f"after round {touched.start['round']}" if touched.start else "from the start"
    lines.append(f"train again {source}")
    return lines


def _format_rounds(rounds: list[int]) -> str:
    """Return numbers of rounds with runs of them shortened.

    >>> _format_rounds([1, 2, 3, 5]), _format_rounds([])
    ('1 to 3, 5', 'none')
    """
    spans: list[list[int]] = []
    for number in rounds:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(f"{span[0]} to {span[-1]}" if len(span) > 1 else str(span[0]) for span in spans) or "none"
