"""``flare-sparse audit``: measure what finished runs reveal about their training examples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core.errors import ConfigError
from .console import build_table, err
from .console import out as console
from .options import TrustCode, take_options
from .screen import Screen

if TYPE_CHECKING:
    from ..results.audit.attacks import Attacker


@dataclass(frozen=True)
class AuditCommandOptions:
    """Options of ``flare-sparse audit``."""

    runs: Annotated[list[Path], typer.Argument(help="Result folders of finished runs", show_default=False)]
    attackers: Annotated[str, typer.Option(help="Attackers, separated by commas")] = "outsider,member,server"
    references: Annotated[
        int, typer.Option(min=0, max=8, help="Reference models of RMIA; each takes as long as a run; 0: no RMIA")
    ] = 4
    canaries: Annotated[
        int, typer.Option(min=0, help="Canaries of one more run, which bound epsilon from below; 0: none")
    ] = 100
    epsilon: Annotated[
        float | None, typer.Option(min=0, help="Epsilon that the run claims; exit code 1 if the canaries contradict it")
    ] = None
    delta: Annotated[float, typer.Option(min=0, max=1, help="Delta of the claim")] = 1e-5
    resamples: Annotated[int, typer.Option(min=0, help="Resamples of the bootstrap intervals; 0: no intervals")] = 1000
    steps: Annotated[
        int, typer.Option(min=0, help="Steps of the optimisation that inverts a message; 0: linear layers only")
    ] = 200
    policy: Annotated[
        str | None, typer.Option(help="Policy of the sites whose messages the server inverts: a file or a preset")
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON")] = False
    trust_code: TrustCode = False


@take_options(AuditCommandOptions)
def audit(options: AuditCommandOptions) -> None:
    """Attack the models of finished runs as an outsider, as another site and as the server, and measure the success.

    Members are the training examples of the sites, non-members their test examples, so the data of all sites must be on
    this machine. Writes RUN/audit.json, which report and model card show. A second call continues an interrupted one.
    Needs the extra audit. docs/audit.md explains the attacks and their figures.

    [dim]flare-sparse audit runs/neurosfl_brain_age[/]

    [dim]flare-sparse audit runs/dense runs/pruned --attackers member --json[/]
    """
    from ..api.run import Run
    from ..config.policy.policy import find_policy_file, read_policy
    from ..results.audit.attacks import AuditOptions
    from ..results.runs.results import AUDIT_FILE

    chosen = _parse_attackers(options.attackers)
    site_policy = read_policy(find_policy_file(Path(options.policy))) if options.policy else None
    settings = AuditOptions(
        references=options.references,
        canaries=options.canaries,
        epsilon=options.epsilon,
        delta=options.delta,
        resamples=options.resamples,
        steps=options.steps,
        policy=site_policy,
        policy_name=options.policy or "",
    )
    records = [Run(run, Screen(err)).audit(chosen, settings) for run in options.runs]
    if options.as_json:
        console.print(json.dumps(records[0] if len(records) == 1 else records, indent=2), markup=False)
    else:
        for run, record in zip(options.runs, records, strict=True):
            _show(record)
            console.print(f"record: {run / AUDIT_FILE}", markup=False)
    if any(attack.get("contradicts_claim") for record in records for attack in record["attacks"]):
        err.print("the canaries contradict the claimed epsilon", markup=False)
        raise typer.Exit(1)


def _parse_attackers(text: str) -> list[Attacker]:
    from ..api.run import ATTACKERS

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or set(names) - set(ATTACKERS):
        raise ConfigError(f"--attackers {text!r}: expected some of {', '.join(ATTACKERS)}, separated by commas")
    return [name for name in ATTACKERS if name in names]


def _show(record: dict[str, Any]) -> None:
    from ..results.report.attacks import describe_result
    from ..results.report.tables import format_metric

    counts = f"{record['members']} members, {record['non_members']} non-members"
    rows = []
    for attack in record["attacks"]:
        bounds = attack["interval"]
        interval = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "-"
        figures = [format_metric(attack[name]) for name in ("auc", "tpr_at_1_percent_fpr")]
        rows.append([attack["attacker"], attack["attack"], figures[0], interval, figures[1], describe_result(attack)])
    columns = ("attacker", "attack", "AUC", "95 % interval", "TPR at 1 % FPR", "result")
    title = f"{record['run']}: attacks; {counts}"
    console.print(build_table(title, columns, rows, left=("attacker", "attack", "result")))
    for attack in record["skipped"]:
        console.print(f"{attack['attacker']}, {attack['attack']}: not made: {attack['reason']}", markup=False)
