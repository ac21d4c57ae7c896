"""``flare-sparse plan``: make one nnU-Net plan for the data of several sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import ConfigError, require_extra
from .console import Screen, err
from .console import out as console

if TYPE_CHECKING:
    from ..tasks.nnunet.fingerprint import Fingerprint


def plan(
    sources: Annotated[
        list[Path],
        typer.Argument(
            help="A study with task: {name: nnunet}, whose sites compute their fingerprints; or folders of raw data",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write, for task.plan")],
    total: Annotated[int, typer.Option(min=1, help="Of a study: cases of all sites together")] = 1000,
    kit: Annotated[
        Path | None,
        typer.Option(
            help="Of a study: startup kit of an admin of a running federation; default: FLARE's simulator",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make one nnU-Net plan for the data of several sites: of their fingerprints, by nnU-Net's planner.

    Of a study, a FLARE job asks the sites. Each follows its policy, as for flare-sparse describe, and sends no
    fingerprint of fewer cases than min_examples; the server keeps the merged one alone, which is written to OUT-job
    beside FLARE's log. The plan does not depend on the order of the sites.

    [dim]flare-sparse plan study.yaml --total 260 --kit kits/lead@our.org --out plan.json[/]

    [dim]flare-sparse plan data/site-1 data/site-2 --out plan.json[/]
    """
    from ..tasks.nnunet.fingerprint import fingerprint_folders
    from ..tasks.nnunet.plan import build_plan, list_configurations

    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, such as {out / 'plan.json'}")
    is_study = len(sources) == 1 and sources[0].suffix in (".yaml", ".yml")
    if others := [source for source in sources if not is_study and not source.is_dir()]:
        raise ConfigError(
            f"{others[0]}: expected a study (.yaml or .yml) alone, or folders of raw data, each with its dataset.json "
            "(docs/nnunet.md)"
        )
    if kit is not None and not is_study:
        raise ConfigError("--kit: it is for a study, whose sites are asked; leave it out")
    with require_extra("flare-sparse plan", "nnunet"):
        import nnunetv2  # noqa: F401
    merged = _collect(sources[0], out, total, kit) if is_study else fingerprint_folders(sources)
    made = build_plan(merged, "Dataset001_Federation")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made, indent=1), encoding="utf-8")
    console.print(f"{out}: plan of {merged.cases} cases")
    for configuration in list_configurations(made):
        entry = made["plans"]["configurations"][configuration]
        console.print(
            f"  {configuration}: patch {entry['patch_size']}, spacing {[round(side, 3) for side in entry['spacing']]}, "
            f"method.training.batch_size {entry['batch_size']}"
        )


def _collect(study: Path, out: Path, total: int, kit: Path | None) -> Fingerprint:
    """Return the fingerprint of the cases of a study's sites, and write it beside FLARE's log."""
    from ..api.describe import collect_fingerprints

    folder = out.parent / f"{out.stem}-job"
    found, sites = collect_fingerprints(study, folder, total=total, kit=kit, observer=Screen(err))
    file = folder / "fingerprint.json"
    file.write_text(found.model_dump_json(indent=1), encoding="utf-8")
    console.print(f"{file}: spacings and shapes of {found.cases} cases of {', '.join(sites)}")
    return found
