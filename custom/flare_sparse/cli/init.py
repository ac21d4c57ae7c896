"""``flare-sparse init``: write a small study to start from."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..config.configurations import CONFIGURATIONS, STARTERS
from ..core.errors import ConfigError
from .console import out as console

Kind = Literal["table", "segmentation", "brain_age", "script", "bundle", "method"]


def init(
    kind: Annotated[Kind, typer.Argument(help="What the study is about")] = "table",
    data: Annotated[
        Path | None, typer.Option(help="Only for table: your own table; its columns are looked at and filled in")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write; nothing in it is replaced")] = Path(),
) -> None:
    """Write a small study, with comments, that passes flare-sparse check as it is: study.yaml, and code where needed.

    Its data are phantoms or invented rows, until you name your own.

    [dim]flare-sparse init table --data cohort.csv && flare-sparse check study.yaml[/]

    [dim]flare-sparse init script && flare-sparse run study.yaml[/]
    """
    sources = [CONFIGURATIONS / name for name in STARTERS[kind]]
    targets = [out / ("study.yaml" if source is sources[0] else source.name) for source in sources]
    if data is not None and kind != "table":
        raise ConfigError(f"--data: {kind} reads no table; leave it out, and name your data in study.yaml")
    example = [out / "patients.csv"] if kind == "table" and data is None else []
    if existing := [str(path) for path in (*targets, *example) if path.exists()]:
        raise ConfigError(f"{', '.join(existing)}: exists already; choose another folder with --out")
    if data is not None:
        from ..config.table_study import describe_table

        # Read before anything is written: a table that cannot be read leaves no half of a study.
        text, notes = describe_table(data)
        out.mkdir(parents=True, exist_ok=True)
        targets[0].write_text(text, encoding="utf-8")
        for note in notes:
            console.print(f"- {note}", markup=False)
    else:
        out.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
        for file in example:
            from ..config.table_study import write_example

            write_example(file)
    console.print(", ".join(str(path) for path in (*targets, *example)), markup=False)
    console.print(f"next: flare-sparse check {targets[0]}; flare-sparse run {targets[0]}", markup=False)
