"""``flare-sparse init``: write a small study to start from."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..config.yaml_files import CONFIGURATIONS, STARTERS
from ..core.errors import ConfigError
from .console import out as console

Kind = Literal["table", "segmentation", "brain_age", "script", "bundle", "nnunet", "method", "component"]
EXTRA_FILES = {"table": ("patients.csv",), "nnunet": ("study.yaml", "plan.json", "data")}
"""What is written beside the starter's files, by kind; the last one only without data."""
READS_DATA = ("table", "segmentation", "brain_age", "nnunet")


def init(
    kind: Annotated[Kind, typer.Argument(help="What the study is about")] = "table",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Your own data, for table, brain_age (BIDS), segmentation and nnunet (its raw format): it is "
            "looked at, and the study filled in"
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write; nothing in it is replaced")] = Path(),
) -> None:
    """Write a small study, with comments, that passes flare-sparse check as it is: study.yaml, and code where needed.

    Its data are phantoms or invented rows, until you name your own.

    [dim]flare-sparse init table --data cohort.csv && flare-sparse check study.yaml[/]

    [dim]flare-sparse init brain_age --data /data/bids && flare-sparse check study.yaml[/]

    [dim]flare-sparse init script && flare-sparse run study.yaml[/]
    """
    if data is not None and kind not in READS_DATA:
        raise ConfigError(f"--data: it is for {', '.join(READS_DATA)}; leave it out, and name your data in study.yaml")
    sources = [CONFIGURATIONS / name for name in STARTERS.get(kind, ())]
    extra = EXTRA_FILES.get(kind, ())
    targets = [out / ("study.yaml" if source.suffix == ".yaml" else source.name) for source in sources]
    targets += [out / name for name in (extra if data is None else extra[:-1])]
    if existing := [str(path) for path in targets if path.exists()]:
        raise ConfigError(f"{', '.join(existing)}: exists already; choose another folder with --out")
    for note in _write(kind, data, out, dict(zip(sources, targets, strict=False))):
        console.print(f"- {note}", markup=False)
    console.print(", ".join(str(path) for path in targets), markup=False)
    first = targets[0]
    commands = f"python {first}" if kind == "component" else f"flare-sparse check {first}; flare-sparse run {first}"
    console.print(f"next: {commands}", markup=False)


def _write(kind: Kind, data: Path | None, out: Path, copies: dict[Path, Path]) -> list[str]:
    """Write the study; return what was inferred from the data, in sentences."""
    notes: list[str] = []
    if kind == "nnunet":
        from .plan import require_nnunet

        require_nnunet()
        from ..config.first_study import write_nnunet_study

        out.mkdir(parents=True, exist_ok=True)
        return write_nnunet_study(out, data)
    if data is not None:
        from ..config.first_study import describe_images, describe_table

        # Read before anything is written: data that cannot be read leaves no half of a study.
        text, notes = describe_table(data) if kind == "table" else describe_images(kind, data)
        out.mkdir(parents=True, exist_ok=True)
        (out / "study.yaml").write_text(text, encoding="utf-8")
        return notes
    out.mkdir(parents=True, exist_ok=True)
    for source, target in copies.items():
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    if kind == "table":
        from ..config.first_study import write_example

        write_example(out / "patients.csv")
    return notes
