"""``flare-sparse audit``: measure what finished runs reveal about their training examples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field, ValidationError

from ..core.errors import ConfigError
from .console import build_table, err
from .console import out as console
from .options import JSON, take_options
from .screen import Screen

if TYPE_CHECKING:
    from ..results.audit.attacks import Attacker


class AttackSettings(BaseModel, extra="forbid"):
    """What ``--set`` may set; see ``AuditOptions``."""

    attackers: str = "outsider,member,server"
    policy: str = ""
    references: int = Field(4, ge=0, le=8)
    canaries: int = Field(100, ge=0)
    epsilon: float | None = Field(None, ge=0)
    delta: float = Field(1e-5, gt=0, lt=1)
    resamples: int = Field(1000, ge=0)
    steps: int = Field(200, ge=0)


@dataclass(frozen=True)
class AuditCommandOptions:
    """Options of ``flare-sparse audit``."""

    runs: Annotated[list[Path], typer.Argument(help="Result folders of finished runs", show_default=False)]
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A setting of the attacks, such as attackers=member; repeatable",
        ),
    ] = None


@take_options(AuditCommandOptions)
def audit(options: AuditCommandOptions) -> None:
    """Attack the models of finished runs as an outsider, as another site and as the server, and measure the success.

    Members are the training examples of the sites, non-members their test examples, so the data of all sites must be on
    this machine. Writes RUN/audit.json, which report and model card show. A second call continues an interrupted one.
    Settings (--set): attackers (outsider,member,server), policy (of the sites whose messages the server inverts: a file
    or a preset), references (reference models of RMIA, each takes as long as a run; 4), canaries (of one more run,
    which bound epsilon from below; 100), epsilon and delta (the run's claim; exit code 1 if contradicted), resamples
    (of the bootstrap; 1000), steps (of the optimisation that inverts a message; 200); 0 leaves each out. Needs the
    extra audit. docs/audit.md explains the attacks and their figures.

    [dim]flare-sparse audit runs/neurosfl_brain_age[/]

    [dim]flare-sparse audit runs/dense runs/pruned --set attackers=member --json[/]
    """
    from ..api.run import Run
    from ..config.policy.policy import find_policy_file, read_policy
    from ..results.audit.attacks import AuditOptions
    from ..results.runs.results import AUDIT_FILE

    given = _read_settings(options.set_ or ())
    chosen = _parse_attackers(given.attackers)
    site_policy = read_policy(find_policy_file(Path(given.policy))) if given.policy else None
    settings = AuditOptions(
        **given.model_dump(exclude={"attackers", "policy"}), policy=site_policy, policy_name=given.policy
    )
    records = [Run(run, Screen(err)).audit(chosen, settings) for run in options.runs]
    if JSON.get():
        console.print(json.dumps(records[0] if len(records) == 1 else records, indent=2), markup=False)
    else:
        for run, record in zip(options.runs, records, strict=True):
            _show(record)
            console.print(f"record: {run / AUDIT_FILE}", markup=False)
    if any(attack.get("contradicts_claim") for record in records for attack in record["attacks"]):
        err.print("the canaries contradict the claimed epsilon", markup=False)
        raise typer.Exit(1)


def _read_settings(given: Sequence[str]) -> AttackSettings:
    """Return the settings of ``--set``.

    Raises:
        ConfigError: one has an unknown name or a value out of range.
    """
    from ..config.problems import describe_problem
    from ..config.yaml_files import apply_overrides

    data = apply_overrides({}, given)
    try:
        return AttackSettings.model_validate(data)
    except ValidationError as error:
        problems = [describe_problem(e, AttackSettings, data, {}) for e in error.errors(include_url=False)]
        raise ConfigError(f"--set: {'; '.join(problems)}") from error


def _parse_attackers(text: str) -> list[Attacker]:
    from ..api.run import ATTACKERS

    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or set(names) - set(ATTACKERS):
        raise ConfigError(f"--set attackers={text}: expected some of {', '.join(ATTACKERS)}, separated by commas")
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
        size = f", batch of {attack['batch_size']}" if attack.get("batch_size") else ""
        rows.append(
            [attack["attacker"], attack["attack"] + size, figures[0], interval, figures[1], describe_result(attack)]
        )
    columns = ("attacker", "attack", "AUC", "95 % interval", "TPR at 1 % FPR", "result")
    title = f"{record['run']}: attacks; {counts}"
    console.print(build_table(title, columns, rows, left=("attacker", "attack", "result")))
    for attack in record["skipped"]:
        console.print(f"{attack['attacker']}, {attack['attack']}: not made: {attack['reason']}", markup=False)
