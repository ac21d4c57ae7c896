"""``flare-sparse evidence``: pack what proves a run into an RO-Crate."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from ..config.policy.policy import find_policy_file, read_policy
from ..core.errors import ConfigError
from ..results.report.card import write_card
from ..results.runs.results import RunResult
from .console import out as console

NO_LICENSE = "No license is granted: ask the publisher of this crate."


def evidence(
    run: Annotated[Path, typer.Argument(help="Result folder of flare-sparse run", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(help="Archive that ends with .zip, or a folder; default: evidence.zip in the result folder"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE=FILE",
            help="Policy in force at a site, its file or a preset's name; repeatable. A run's record has none, because "
            "a policy stays at its site",
        ),
    ] = None,
    kit: Annotated[
        Path | None,
        typer.Option(help="Startup kit of a participant, to check who signed the job; default: that of the run's POC"),
    ] = None,
    license_: Annotated[
        str, typer.Option("--license", help="License of the crate and its model: a URL or an SPDX identifier")
    ] = NO_LICENSE,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier crate")] = False,
) -> None:
    """Pack a run's evidence as an RO-Crate: who took part, under which terms, what was sent, and what came out.

    It holds cohort sizes by site, the configuration, the policies given with --policy, the privacy budget and the audit
    if the run has them, the ledger, digests, versions and a bill of materials (CycloneDX), every deviation (sites left
    out, retries, steps back), and who signed the job. No data, prediction or site's own model goes in. Needs the extra
    evidence.

    [dim]flare-sparse evidence runs/neurosfl_brain_age[/]

    [dim]flare-sparse evidence runs/study --kit kits/lead@coordination.org --policy site-1=careful --out study.zip[/]
    """
    try:
        from ..results.evidence.crate import write_crate
    except ImportError as error:
        raise ConfigError(
            f"evidence needs rocrate and cyclonedx-python-lib: pip install 'flare-sparse[evidence]' ({error.name})"
        ) from error
    from ..flare.launch.approval import read_approval
    from ..results.evidence.facts import collect_facts

    target = out or run / "evidence.zip"
    _check_target(target, overwrite=overwrite)
    result = RunResult.read(run)
    files = _find_policies(policy or [])
    # Written again: evaluations and audits after the run belong to the card.
    write_card(result)
    facts = collect_facts(result, read_approval(run, kit), {site: read_policy(file) for site, file in files.items()})
    write_crate(result, facts, files, target, license_)
    console.print(str(target), markup=False, soft_wrap=True)
    console.print(f"signature of the job: {facts['approval']['signature']}; deviations: {len(facts['deviations'])}")


def _find_policies(given: list[str]) -> dict[str, Path]:
    """Return the files of policies by site.

    Raises:
        ConfigError: an option is not of the form SITE=FILE, or there is no such file.
    """
    files = {}
    for text in given:
        site, separator, file = text.partition("=")
        if not (site and separator and file):
            raise ConfigError(f"--policy {text}: expected SITE=FILE, such as site-1=careful")
        files[site] = find_policy_file(Path(file))
    return files


def _check_target(target: Path, *, overwrite: bool) -> None:
    """Raises:
    ConfigError: the target exists, and it is not replaced.
    """
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        return
    is_crate = target.suffix == ".zip" or (target / "ro-crate-metadata.json").is_file()
    if not overwrite or not is_crate:
        raise ConfigError(f"--out {target}: exists; choose another name" + (", or add --overwrite" if is_crate else ""))
    if target.is_dir():
        shutil.rmtree(target)
