"""``flare-sparse check``: find in seconds, and report together, what would stop a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..config.yaml_files import find_configuration
from ..core.errors import ConfigError
from ..core.findings import Finding, attempt, get_exit_code
from .console import COLOURS, JSON, out, print_finding, print_json
from .options import Overrides

if TYPE_CHECKING:
    from ..config.study import Study


def check(
    config: Annotated[
        Path | None,
        typer.Argument(help="Configuration file, or the name of one of the package's own"),
    ] = None,
    overrides: Overrides = None,
    site: Annotated[
        Path | None,
        typer.Option(
            metavar="KIT|POLICY",
            help="A site's startup kit: is the site ready, for any job or for CONFIG? Or a policy, a file or one of "
            "open, careful, strict: would a site with it take CONFIG?",
        ),
    ] = None,
) -> None:
    """Check a configuration: settings, model, data, and a first round with one training step at every site.

    A training script answers one request at one site; it is stopped after a minute.

    Every problem gets a FAIL line with its cause and the way out; WARN lines do not stop a run. The last line is the
    verdict. Exit code: 0 if a run of one round would end with all sites, 2 for a wrong configuration, else 1. Nothing
    leaves this machine. In Python: Study.check().

    With --site KIT a site's startup kit is checked, and changed in nothing: certificates, classes, guards, policy,
    data, the way to the server; with CONFIG also whether the job can read the data there and the policy allows it.

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --set method.sparsity=0.95[/]

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --site careful[/]

    [dim]flare-sparse check study.yaml --site /opt/flare/site-1[/]
    """
    if site is not None and site.is_dir():
        raise typer.Exit(min(print_findings(_check_site(site, config, overrides or ())), 1))
    if config is None:
        raise ConfigError("name a configuration to check, or with --site the startup kit of a site")
    raise typer.Exit(print_findings(_check(config, overrides or (), site)))


def _check(config: Path, overrides: Sequence[str], policy: Path | None) -> Iterator[Finding]:
    from ..config.study import Study

    tried = attempt("configuration", lambda: Study.load(config, overrides), _describe)
    yield tried.finding
    if tried.result is not None:
        yield from tried.result.check(site_policy=policy)


def _check_site(kit: Path, file: Path | None, overrides: Sequence[str]) -> Iterator[Finding]:
    from ..config.loading import load_config
    from ..config.user_classes import load_task
    from ..flare.site.preflight import check_site

    if file is None:
        yield from check_site(kit)
        return
    found = find_configuration(file)
    config = load_config(found, overrides)
    yield from check_site(kit, config, load_task(config, found.parent))


def print_findings(findings: Iterable[Finding]) -> int:
    """Print findings as they come, and the verdict, or all of them as JSON; return the exit code."""
    found, places = [], dict[str, list[str]]()
    for finding in findings:
        found.append(finding)
        places.setdefault(finding.severity, []).append(finding.place)
        if not JSON.get():
            print_finding(finding)
    if not print_json([asdict(finding) for finding in found]):
        failed, warned, passed = (places.get(severity, []) for severity in ("FAIL", "WARN", "PASS"))
        verdict = f"{len(failed)} of {len(passed) + len(failed)} checks failed: {', '.join(failed)}"
        out.print("NOT READY" if failed else "READY", style=COLOURS["FAIL" if failed else "PASS"], end=" ")
        more = f"; {len(warned)} to look at: {', '.join(warned)}" if warned else ""
        out.print((verdict if failed else f"{len(passed)} checks passed") + more)
    return get_exit_code(found)


def _describe(study: Study) -> str:
    config = study.config
    return f"{config.name}, method {config.method.name}, task {config.task.name}"
