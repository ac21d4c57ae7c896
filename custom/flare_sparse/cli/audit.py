"""``flare-sparse audit``: measure what finished runs reveal about their training examples."""

from typing import Annotated

import typer

from .console import Screen, build_table, err, print_json
from .console import out as console
from .options import Runs


def audit(
    runs: Runs,
    references: Annotated[
        int,
        typer.Option(
            min=0, max=8, help="Reference models of RMIA, each of which takes as long as the run; 0: no such attack"
        ),
    ] = 4,
) -> None:
    """Attack the models of finished runs as an outsider and as another site, and measure the success.

    Members are the training examples of the sites, non-members their test examples, so the data of all sites must be on
    this machine. Writes RUN/audit.json, which report and model card show. A second call continues an interrupted one.
    Needs the extra audit. docs/audit.md explains the attacks and their figures.

    [dim]flare-sparse audit runs/neurosfl_brain_age[/]

    [dim]flare-sparse audit runs/dense runs/pruned --references 0 --json[/]
    """
    from ..api.run import Run
    from ..results.report.attacks import COLUMNS, format_attack
    from ..results.runs.results import AUDIT_FILE

    records = [Run(run, Screen(err)).audit(references) for run in runs]
    if print_json(records[0] if len(records) == 1 else records):
        return
    for run, record in zip(runs, records, strict=True):
        title = f"{record['run']}: attacks; {record['members']} members, {record['non_members']} non-members"
        rows = [format_attack(attack) for attack in record["attacks"]]
        console.print(build_table(title, COLUMNS, rows, left=("attacker", "attack", "result")))
        for attack in record["skipped"]:
            console.print(f"{attack['attack']}: not made: {attack['reason']}")
        console.print(f"record: {run / AUDIT_FILE}")
