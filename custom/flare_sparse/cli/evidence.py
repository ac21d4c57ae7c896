"""``flare-sparse evidence``: write what proves a run as an annex for an impact assessment."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import ConfigError
from .console import out as console
from .options import Out


def evidence(
    run: Annotated[Path, typer.Argument(help="Result folder of flare-sparse run")],
    out: Out = None,
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
) -> None:
    """Write a run's evidence as an annex for an impact assessment, which a person completes.

    It states who took part, under which terms, what left each site, the privacy budget and the attacks if the run has
    them, every deviation (sites left out, retries, steps back), who signed the job, and the digest of each file. The
    file --out ends with .md or .pdf; without it, it is dpia.md in the result folder. A PDF needs the extra evidence.

    [dim]flare-sparse evidence runs/neurosfl_brain_age[/]

    [dim]flare-sparse evidence runs/neurosfl_brain_age --out annex.pdf[/]

    [dim]flare-sparse evidence runs/study --kit kits/lead@coordination.org --site site-1=careful --out annex.pdf[/]
    """
    from ..api.run import Run

    logs, policies = _parse_sites(sites or [])
    console.print(str(Run(run).evidence(out, policies=policies, egress=logs, kit=kit)))


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
