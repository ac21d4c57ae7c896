"""Bytes of whole runs and their error on every subject, against FedAvg in float32: brain age from T1w volumes.

    python benchmarks/experiments/bytes_paired.py ../shared/data/brain_t1 [--seeds 1 2 3] [--out FOLDER]
    python benchmarks/experiments/bytes_paired.py --report [--picture FILE] [--out FOLDER]

Sites, folds, network and files are those of ``brain_t1.py``: five folds at every site test every subject once per seed,
no round and no setting is chosen, and every figure is of the last model, as the sites hold it. Every message of a run
counts, from the statistics of inputs to the last evaluation. ``--report`` prints the tables, ``--picture`` draws error
by bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from brain_t1 import FOLDS, TRAINING, Arm, Volumes, run
from brain_t1_report import build_table, compare, format_arm, format_difference, plot_errors, read_arms
from runs import claim

from flare_sparse.core.checkpoint.writing import write_json

REFERENCE, TUNED = "FedAvg, float32", "FedAvg, float32, lr 0.003"
ONE_WAY = f"method={{name: topk_ef, fraction: 0.1, rounds: 30, training: {TRAINING.replace('0.003', '0.001')}}}"
BOTH = "top-k both ways, int2"


def share(percent: float) -> tuple[str, ...]:
    """Return the settings of another share than the one that validation chose."""
    return (f"method.fraction={percent / 100:g}", f"method.down={percent / 100:g}")


ARMS = (
    Arm(REFERENCE),
    Arm(BOTH, "topk_voxels"),
    Arm("top-k 10 %, int2", overrides=(ONE_WAY, "wire.values=int2")),
    Arm(TUNED, overrides=("method.training.lr=0.003",)),
    Arm("top-k both ways, int2, no decay", "topk_voxels", ("method.decay=1",)),
    Arm("top-k both ways, int2, model sent", "topk_voxels", ("wire.initial_model=sent",)),
    Arm("top-k both ways 3 %, int2", "topk_voxels", share(3)),
    Arm("top-k both ways 1 %, int2", "topk_voxels", share(1)),
)


def report(folder: Path) -> str:
    """Return the tables of the runs in a folder."""
    arms = read_arms(folder)
    sent = {label: float(np.mean([run["bytes"] for run in arm.runs])) for label, arm in arms.items()}
    labels = [arm.label for arm in ARMS if arm.label in arms]
    head = ["", "subjects, tests", "error, years [95 %]", "by seed", "R2 within sites", "sent", "less", "than FedAvg"]
    rows = [f"{format_arm(label, arms[label])} {sent[REFERENCE] / sent[label]:.0f}x |" for label in labels]
    pairs = [(label, other) for label in labels for other in (REFERENCE, TUNED) if label != other]
    pair_head = ["", "subjects", "years [95 %]", "share", "verdict", "sites that gain", "worst site"]
    known = [pair for pair in pairs if compare(arms, *pair)]
    return "\n".join(
        [*build_table(head, rows), "", *build_table(pair_head, [format_difference(arms, *pair) for pair in known])]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder with the BIDS data sets IXI-HH and NSK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/bytes_paired"))
    parser.add_argument("--report", action="store_true", help="print the tables of the files in --out")
    parser.add_argument("--picture", type=Path, help="draw the error by round and by bytes to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.data:
        volumes = Volumes(arguments.data)
        plan = ((arm, seed, fold) for arm in ARMS for seed in arguments.seeds for fold in range(1, FOLDS + 1))
        for arm, seed, fold in plan:
            file = arguments.out / f"{arm.file_name}_{seed}_{fold}.json"
            with claim(file) as is_claimed:
                if is_claimed:
                    write_json(file, run(arm, seed, fold, arguments.data, volumes) | {"table": ""})
    if arguments.report:
        print(report(arguments.out))
    if arguments.picture:
        plot_errors(read_arms(arguments.out), [REFERENCE, "top-k 10 %, int2", BOTH], arguments.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
