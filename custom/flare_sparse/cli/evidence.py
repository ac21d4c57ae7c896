"""``flare-sparse evidence``: pack what proves a run into an RO-Crate."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import ConfigError
from ..results.evidence import ANNEX_SUFFIXES, NO_LICENSE
from .console import out as console


def evidence(
    run: Annotated[Path, typer.Argument(help="Result folder of flare-sparse run", show_default=False)],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Archive that ends with .zip, or a folder; default: evidence.zip in the result folder. With a file "
            "that ends with .md, .docx or .pdf, an annex for an impact assessment is written instead, to be edited"
        ),
    ] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "--site",
            metavar="SITE=PATH",
            help="What a site has handed out: its policy, as a file or a preset's name, or the folder of its egress "
            "log; repeatable. A run's record has neither, because they stay at the site",
        ),
    ] = None,
    kit: Annotated[
        Path | None,
        typer.Option(help="Startup kit of a participant, to check who signed the job; default: that of the run's POC"),
    ] = None,
    license_: Annotated[
        str, typer.Option("--license", help="License of the crate and its model: a URL or an SPDX identifier")
    ] = NO_LICENSE,
) -> None:
    """Pack a run's evidence as an RO-Crate: who took part, under which terms, what was sent, and what came out.

    It holds cohort sizes by site, the configuration, the policies given with --site, the privacy budget and the audit
    if the run has them, the ledger, digests, versions and a bill of materials (CycloneDX), every deviation (sites left
    out, retries, steps back), and who signed the job. No data, prediction or site's own model goes in. Needs the extra
    evidence.

    [dim]flare-sparse evidence runs/neurosfl_brain_age[/]

    [dim]flare-sparse evidence runs/neurosfl_brain_age --out annex.docx[/]

    [dim]flare-sparse evidence runs/study --kit kits/lead@coordination.org --site site-1=careful --out study.zip[/]
    """
    from ..api.run import Run

    logs, policies = _parse_sites(sites or [])
    if out is not None and out.suffix in ANNEX_SUFFIXES:
        console.print(str(Run(run).write_dpia(out, policies=policies, egress=logs, kit=kit)), markup=False)
        return
    target, facts = Run(run).evidence(out, policies=policies, egress=logs, kit=kit, license_=license_)
    console.print(str(target), markup=False, soft_wrap=True)
    console.print(f"signature of the job: {facts['approval']['signature']}; deviations: {len(facts['deviations'])}")


def _parse_sites(given: list[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the folders of egress logs, and the policies, by site.

    Raises:
        ConfigError: one is not of the form SITE=PATH.
    """
    logs: dict[str, Path] = {}
    policies: dict[str, str] = {}
    for text in given:
        site, _, value = text.partition("=")
        if not (site and value):
            raise ConfigError(f"--site {text}: expected SITE=PATH, such as site-1=careful")
        if Path(value).is_dir():
            logs[site] = Path(value)
        else:
            policies[site] = value
    return logs, policies
