r"""Canaries: lower bounds on the epsilon of private runs, of a run with a false claim, and of one without privacy.

    python benchmarks/experiments/canaries.py ../shared/data [--canaries 500] [--out runs/canaries]

Age from the FreeSurfer tables of one cohort (1,078 subjects) at one site, whose model no average with others dilutes;
a wide network that trains long enough to learn by heart. Each line trains a model and, for the audit, one more with a
random half of the canaries: examples with the targets of others. The attacker sees by how much the loss of each fell.
The false claim is of a run with far too little noise, as a defect of the noise would have it. Finished runs and attacks
are not repeated. Exits with 1 if an honest claim is contradicted or the false one is not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from canary_bound import Canaries, bound_epsilon
from torch.utils.data import ConcatDataset, Subset

from flare_sparse.api.local import run as run_in_process
from flare_sparse.config.assemble import open_site
from flare_sparse.config.study import Study
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.core.seeds import derive_seed, limit_threads
from flare_sparse.results.audit.result import Ranking, guess_members, measure_rankings
from flare_sparse.results.audit.training import (
    AuditedExamples,
    Retraining,
    compute_losses,
    select_rows,
)
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.load import load_study, load_trained_model

CONFIG = Path(__file__).resolve().parents[2] / "app_configs" / "dp_morphometry_age.yaml"
TABLE = "brain_morphometry/destrieux_fcon1000.csv.gz"
LEARNING = "rounds: 5, training: {epochs: 20, batch_size: 64, optimizer: adam, lr: 5e-3}"
RECORD = "canaries.json"
"""File in a result folder with the attack."""
DELTA = 1e-5


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
    """Return the attack by canaries, after training and attacking unless that was done before."""
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
    summary = json.loads((out / "summary.json").read_text())
    found = json.loads((out / RECORD).read_text()) if (out / RECORD).is_file() else {}
    if found.get("canaries") != arguments.canaries:
        print(f"{name}: training with half of {arguments.canaries} canaries", flush=True)
        found = attack_by_canaries(out, arguments.canaries, case.claim)
        write_json(out / RECORD, found)
    return {**found, "mae": summary["final"]["metrics"]["mae"]}


def attack_by_canaries(run: Path, count: int, claim: float) -> dict[str, Any]:
    """Train a finished run once more with half of the canaries, and bound epsilon (Steinke et al. 2023)."""
    study = load_study(run)
    task, seed, data = study.assembly.task, study.config.seed, study.prepare_sites(run)
    with limit_threads(study.config.torch_threads):
        own = {name: open_site(study.assembly, where).trainer.examples for name, where in data.items()}
        examples = AuditedExamples.from_sites(own)
        generator = np.random.default_rng(derive_seed(seed, "audit canaries"))
        shuffled = generator.permutation(len(examples.sites))
        # Non-members first: the examples that canaries are made of do not train the model.
        shuffled = shuffled[np.argsort(examples.is_member[shuffled], kind="stable")]
        rows = np.sort(shuffled[:count])
        canaries = Canaries(examples.dataset, rows.tolist(), derive_seed(seed, "audit targets"))
        is_included = generator.random(len(rows)) < 0.5
        # An example and a canary made of it would contradict each other, so that neither would be learned by heart.
        remaining = examples.is_member.copy()
        remaining[rows] = False
        datasets = select_rows(examples, remaining)
        for site, dataset in datasets.items():
            included = np.flatnonzero(is_included & (examples.sites[rows] == site)).tolist()
            datasets[site] = ConcatDataset([dataset, Subset(canaries, included)])
        model = Retraining(run, study.config, data, own).train(datasets, derive_seed(seed, "audit canary model") >> 11)
        before, after = (compute_losses(task, network, canaries) for network in (load_trained_model(study), model))
    bound = bound_epsilon(before - after, is_included, DELTA)
    ranking = Ranking(np.arange(len(rows)), before - after, guess_members(before - after, is_included))
    return {
        **measure_rankings([ranking], is_included, np.full(len(rows), "")),
        "epsilon_lower_bound": bound.epsilon,
        "claimed_epsilon": claim,
        "contradicts_claim": bound.epsilon > claim,
        "canaries": bound.canaries,
        "guesses": bound.guesses,
        "correct_guesses": bound.correct,
    }


def is_wrong(case: Case, attack: dict[str, Any]) -> bool:
    """Return whether the audit accuses an honest claim or believes a false one."""
    return case.is_honest is not None and attack["contradicts_claim"] == case.is_honest


def format_table(attacks: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| run | MAE | claim | lower bound | correct guesses | AUC | claim contradicted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in attacks.items():
        low, high = found["intervals"]["auc"]
        lines.append(
            f"| {name} | {found['mae']:.2f} | {found['claimed_epsilon']:g} | {found['epsilon_lower_bound']:.2f} | "
            f"{found['correct_guesses']} of {found['guesses']} | {found['auc']:.3f} ({low:.3f} to {high:.3f}) | "
            f"{'yes' if found['contradicts_claim'] else 'no'} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
