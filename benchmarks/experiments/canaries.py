r"""Canaries: lower bounds on the epsilon of private runs, of a run with a false claim, and of one without privacy.

    python benchmarks/experiments/canaries.py ../shared/data [--canaries 500] [--out runs/canaries]

Age from the FreeSurfer tables of one cohort (1,078 subjects) at one site, whose model no average with others dilutes;
a wide network that trains long enough to learn by heart. Each line trains a model and, for the audit, one more with a
random half of the canaries: examples with the targets of others. ``claim`` is what the audit is told. The false claim
is of a run with far too little noise, as a defect of the noise would have it. Finished runs and audits are not
repeated. Exits with 1 if an honest claim is contradicted or the false one is not.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.study import Study
from flare_sparse.results.audit.attacks import AuditOptions
from flare_sparse.results.audit.record import audit_run
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.load import load_study
from flare_sparse.results.runs.results import RunResult

CONFIG = Path(__file__).resolve().parents[2] / "app_configs" / "dp_morphometry_age.yaml"
TABLE = "brain_morphometry/destrieux_fcon1000.csv.gz"
LEARNING = "rounds: 5, training: {epochs: 20, batch_size: 64, optimizer: adam, lr: 5e-3}"
CONSOLE = Console(highlight=False)


@dataclass(frozen=True)
class Case:
    """A run and what it claims; ``is_honest``: None for a run without a claim of its own."""

    privacy: str
    claim: float
    is_honest: bool | None


CASES = {
    "epsilon 1": Case("{epsilon: 1, delta: 1e-5}", 1, True),
    "epsilon 3": Case("{epsilon: 3, delta: 1e-5}", 3, True),
    "epsilon 8": Case("{epsilon: 8, delta: 1e-5}", 8, True),
    "false claim: noise 0.001 * clip": Case("{noise_multiplier: 0.001, delta: 1e-5}", 1, False),
    "no privacy": Case("null", 1, None),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with brain_morphometry/")
    parser.add_argument("--canaries", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("runs/canaries"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    attacks = {name: attack(name, arguments) for name in arguments.only}
    print(format_table(attacks))
    return int(any(is_wrong(CASES[name], attack) for name, attack in attacks.items()))


def attack(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the attack by canaries, after training and auditing unless that was done before."""
    case, out = CASES[name], arguments.out.resolve() / f"{name.partition(':')[0].replace(' ', '_')}-{arguments.seed}"
    if not (out / "summary.json").is_file():
        settings = [
            f"method={{name: fedavg, {LEARNING}}}",
            "task.target_scale=[30, 15]",
            "task.model={name: mlp, hidden: [256]}",
            "simulator.sites=1",
            "simulator.data.partition={kind: iid, sizes: uniform, seed: 1}",
            f"simulator.data.path={(arguments.data / TABLE).resolve()}",
            f"privacy={case.privacy}",
            f"seed={arguments.seed}",
        ]
        run_in_process(Study.load(CONFIG, settings), RunFolder(out))
    run = RunResult.read(out)
    if not run.audit or run.audit["options"]["canaries"] != arguments.canaries:
        options = AuditOptions(references=0, canaries=arguments.canaries, epsilon=case.claim)
        data = load_study(out).prepare_sites(out)
        audit_run(run, data, ["outsider"], options, lambda line: CONSOLE.print(f"{name}: {line}"))
        run = RunResult.read(out)
    (found,) = (attack for attack in run.audit["attacks"] if attack["attack"] == "canaries")
    return {**found, "mae": run.summary["final"]["metrics"]["mae"]}


def is_wrong(case: Case, attack: dict[str, Any]) -> bool:
    """Return whether the audit accuses an honest claim or believes a false one."""
    return case.is_honest is not None and attack["contradicts_claim"] == case.is_honest


def format_table(attacks: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| run | MAE | claim | lower bound | correct guesses | AUC | claim contradicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in attacks.items():
        low, high = found["interval"]
        lines.append(
            f"| {name} | {found['mae']:.2f} | {found['claimed_epsilon']:g} | {found['epsilon_lower_bound']:.2f} | "
            f"{found['correct_guesses']} of {found['guesses']} | {found['auc']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{'yes' if found['contradicts_claim'] else 'no'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
