"""``flare-sparse nnunet``: one nnU-Net plan for the data of several sites."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import ConfigError
from ..tasks.nnunet.planner import Planner
from .console import err
from .console import out as console
from .screen import Screen

if TYPE_CHECKING:
    from ..tasks.nnunet.fingerprint import Fingerprint

HELP = """Plan nnU-Net for the data of several sites: each site computes a fingerprint, the centre makes one plan.

[dim]flare-sparse nnunet collect study.yaml --total 260 --kit kits/lead@our.org --out all.json[/]

[dim]flare-sparse nnunet plan all.json --out plan.json[/]
"""
_DEFAULT_TOTAL = 1000

nnunet = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", help=HELP, add_completion=False)


@nnunet.command()
def collect(
    config: Annotated[Path, typer.Argument(help="Configuration with task: {name: nnunet}, YAML", show_default=False)],
    out: Annotated[Path, typer.Option(help="File to write: the fingerprint of all sites' cases together")],
    total: Annotated[int, typer.Option(min=1, help="Cases of all sites together")] = _DEFAULT_TOTAL,
    kit: Annotated[
        Path | None,
        typer.Option(
            help="Startup kit of an admin: the sites of a running federation; default: FLARE's simulator",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a FLARE job in which each site computes its fingerprint, and the server merges them.

    Each site follows its policy, as for flare-sparse describe, and sends none of fewer cases than min_examples. The
    server keeps the merged one alone. FLARE's log is in the folder OUT-job beside the file.

    [dim]flare-sparse nnunet collect study.yaml --total 260 --kit kits/lead@our.org --out all.json[/]
    """
    from ..api.collect import collect_fingerprints

    require_nnunet()
    if out.is_dir():
        raise ConfigError(f"--out {out}: is a folder; name a file, such as {out / 'all.json'}")
    folder = out.parent / f"{out.stem}-job"
    found, sites = collect_fingerprints(config, folder, total=total, kit=kit, observer=Screen(err))
    out.write_text(found.model_dump_json(indent=1), encoding="utf-8")
    console.print(f"{out}: spacings and shapes of {found.cases} cases of {', '.join(sites)}", markup=False)


@nnunet.command()
def plan(
    sources: Annotated[
        list[Path],
        typer.Argument(help="Fingerprints of the sites, or folders of raw data that are here", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="File to write, for task.plan")],
    name: Annotated[str, typer.Option(help="nnU-Net's name of the data set")] = "Dataset001_Federation",
    planner: Annotated[Planner, typer.Option(help="nnU-Net's planner")] = "ExperimentPlanner",
    memory_gb: Annotated[
        float | None, typer.Option(min=1, help="GPU memory for training in GB", show_default="the planner's own")
    ] = None,
) -> None:
    """Merge fingerprints and let nnU-Net's planner make one plan, which a job carries in task.plan.

    The result does not depend on the order of the sites.

    [dim]flare-sparse nnunet plan site-1.json site-2.json --out plan.json[/]
    """
    from ..tasks.nnunet.fingerprint import merge_fingerprints
    from ..tasks.nnunet.plan import build_plan, list_configurations

    require_nnunet()
    made = build_plan(merged := merge_fingerprints(_read_sources(sources)), name, planner, memory_gb)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(made, indent=1), encoding="utf-8")
    console.print(f"{out}: plan of {merged.cases} cases of {len(sources)} sites", markup=False)
    for configuration in list_configurations(made):
        entry = made["plans"]["configurations"][configuration]
        console.print(
            f"  {configuration}: patch {entry['patch_size']}, spacing {[round(side, 3) for side in entry['spacing']]}, "
            f"method.training.batch_size {entry['batch_size']}",
            markup=False,
        )


def _read_sources(sources: Sequence[Path]) -> list[Fingerprint]:
    """Return the fingerprints in files, and those of folders with as many samples per case as the files have."""
    from ..tasks.nnunet.fingerprint import compute_fingerprint, count_samples, read_fingerprint
    from ..tasks.nnunet.raw import find_raw_cases

    files = {source: read_fingerprint(source) for source in sources if not source.is_dir()}
    total = sum(len(find_raw_cases(source)) for source in sources if source.is_dir())
    samples = next((found.samples_per_case for found in files.values()), count_samples(max(total, 1)))
    return [files[source] if source in files else compute_fingerprint(source, samples) for source in sources]


def require_nnunet() -> None:
    """Refuse to go on without nnU-Net.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("nnunetv2") is None:
        raise ConfigError("needs nnU-Net: pip install 'flare-sparse[nnunet]' (docs/nnunet.md)")
