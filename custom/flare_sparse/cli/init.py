"""``flare-sparse init``: write a small study to start from."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..config.yaml_files import CONFIGURATIONS, STARTERS
from ..core.errors import ConfigError, require_extra
from .console import out as console

Kind = Literal["table", "segmentation", "brain_age", "script", "bundle", "nnunet", "method", "component"]
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
    sources = [CONFIGURATIONS / name for name in (STARTERS[kind] if data is None else STARTERS[kind][:1])]
    targets = [out / ("study.yaml" if source.suffix == ".yaml" else source.name) for source in sources]
    if kind == "nnunet":
        with require_extra("flare-sparse init nnunet", "nnunet"):
            import nnunetv2  # noqa: F401
        targets += [out / "plan.json", *([out / "data"] if data is None else [])]
    if existing := [str(path) for path in targets if path.exists()]:
        raise ConfigError(f"{', '.join(existing)}: exists already; choose another folder with --out")
    if data is not None or kind == "nnunet":
        from ..config.first_study import write_study

        for note in write_study(kind, data, out):
            console.print(f"- {note}")
    else:
        out.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            (shutil.copytree if source.is_dir() else shutil.copyfile)(source, target)
    console.print(", ".join(str(path) for path in targets))
    first = targets[0]
    commands = f"python {first}" if kind == "component" else f"flare-sparse check {first}; flare-sparse run {first}"
    console.print(f"next: {commands}")
