"""Does it pay to train longer in early rounds? Brain age from T1w volumes, top-k at both ends, at equal bytes.

    python benchmarks/experiments/adaptive_epochs.py ../shared/data/brain_t1 [--seeds 1] [--out runs/adaptive_epochs]
    python benchmarks/experiments/adaptive_epochs.py --report [--out runs/adaptive_epochs]

Sites, folds and network are those of ``brain_t1.py``, settings those of ``app_configs/topk_voxels.yaml``. All rows send
the same number of messages of the same size, and all but the first make about the same number of local steps. ``by the
step`` lets the norm of the last aggregated step decide, which every site computes from the two models that it received.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from brain_t1 import FOLDS, Arm, Volumes, run
from brain_t1_report import build_table, format_arm, format_difference, read_arms
from runs import claim
from torch import Tensor

from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.training.trainer import Trainer, Training, Wrapper

ROUNDS, MOST = 30, 4
Rule = Callable[[int, float], int]
"""Epochs of a round, by its number and the norm of the last aggregated step relative to the largest one so far."""
CONSTANT = "2 epochs"
RULES: dict[str, Rule] = {
    CONSTANT: lambda number, step: 2,
    "1 epoch": lambda number, step: 1,
    "3 epochs, falling to 1": lambda number, step: round(3 - 2 * (number - 1) / (ROUNDS - 1)),
    "1 epoch, rising to 3": lambda number, step: round(1 + 2 * (number - 1) / (ROUNDS - 1)),
    "4 to 1, by the step": lambda number, step: max(1, min(MOST, round(MOST * step))),
}


class ScheduledTrainer(Wrapper):
    """Trains for the number of epochs that a rule gives."""

    def __init__(self, inner: Trainer, rule: Rule):
        super().__init__(inner)
        self._rule = rule
        self._start: Tensor | None = None
        self._largest = 0.0

    def train(self, training: Training) -> Tensor:
        step = 1.0
        if self._start is not None:
            norm = float((training.start - self._start).norm())
            self._largest = max(self._largest, norm)
            step = norm / self._largest if self._largest else 1.0
        self._start = training.start.clone()
        epochs = self._rule(training.round, step)
        return self._inner.train(replace(training, config=training.config.model_copy(update={"epochs": epochs})))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder with the BIDS data sets IXI-HH and NSK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=Path, default=Path("runs/adaptive_epochs"))
    parser.add_argument("--report", action="store_true", help="print the tables of the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.data:
        volumes = Volumes(arguments.data)
        for seed in arguments.seeds:
            for fold in range(1, FOLDS + 1):
                for label, rule in RULES.items():
                    arm = Arm(label, "topk_voxels")
                    file = arguments.out / f"{arm.file_name}_{seed}_{fold}.json"
                    with claim(file) as is_claimed:
                        if is_claimed:
                            found = run(
                                arm,
                                seed,
                                fold,
                                arguments.data,
                                volumes,
                                lambda own, rule=rule: ScheduledTrainer(own, rule),
                            )
                            write_json(file, found)
                            print(f"{label}, seed {seed}, fold {fold}: {found['seconds']:.0f} s", flush=True)
    if arguments.report:
        arms = read_arms(arguments.out)
        labels = [label for label in RULES if label in arms]
        head = ["", "subjects, tests", "error, years [95 %]", "by seed", "R2 within sites", "sent"]
        print("\n".join(build_table(head, [format_arm(label, arms[label]) for label in labels])))
        pair_head = ["", "subjects", "years [95 %]", "share", "verdict", "sites that gain", "worst site"]
        pairs = [format_difference(arms, label, CONSTANT) for label in labels if label != CONSTANT]
        print("\n".join(build_table(pair_head, pairs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
