"""``flare-sparse phantom``: write synthetic brain volumes."""

from pathlib import Path
from typing import Annotated

import typer

from .console import out as console


def phantom(
    out: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty")],
    sites: Annotated[int, typer.Option(min=1, max=99, help="Number of sites")] = 4,
    subjects: Annotated[int, typer.Option(min=1, max=999, help="Subjects per site")] = 40,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the random anatomy; the same seed gives the same volumes")
    ] = 0,
) -> None:
    """Write a BIDS data set of T1w brain phantoms whose anatomy varies with age, sex and site.

    [dim]flare-sparse phantom brains --sites 4 --subjects 40[/]
    """
    from ..tasks.data.phantom import write_phantoms

    folder = write_phantoms(out, sites, subjects, seed)
    console.print(f"{folder}: {sites * subjects} phantoms of {sites} sites")
