"""Learning curves of brain age: a 3D-CNN and the MLP on the same 9 mm voxels, by the number of training subjects.

    python benchmarks/experiments/brain_curve.py ../shared/data/brain_t1 [--folds 3] [--out FOLDER] [--docs]

The data of all sites is pooled. In each of five folds a fifth of the training subjects is set aside to choose a setting
of :data:`SETTINGS` for each network and each number of subjects; a network with that setting then trains on all of
them, and is tested once, on the fold. The training subjects of a smaller number are among those of a larger one.
Finished runs are not repeated; ``--docs`` writes the section ``brain_curve`` of docs/results/age.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from brain_t1 import FOLDS, Arm, Volumes, build_config
from page_tables import write_section
from runs import claim
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from flare_sparse.config.assemble import assemble
from flare_sparse.config.schema import RunConfig
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.core.seeds import make_generator
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, build_site

SEED = 1
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the training subjects of a fold."""
AUGMENTED = "task.augmentation={shift: 1, intensity: 0.05}"
SETTINGS = {
    "MLP": tuple(
        (f"method.training.lr={rate}", f"method.training.weight_decay={decay}")
        for rate, decay in ((0.001, 1), (0.003, 1), (0.001, 0.1))
    ),
    "CNN": tuple(
        ("task.model={name: voxel_cnn}", f"method.training.lr={rate}", f"method.training.weight_decay={decay}", *more)
        for rate, decay, more in ((0.001, 0.1, ()), (0.003, 0.1, ()), (0.001, 0.1, (AUGMENTED,)))
    ),
}
"""Those of the table of 3D convolutions, with a neighbour, and for the CNN augmentation."""
DRAWS = 4000


def train(config: RunConfig, own: Dataset[Any], tests: Dataset[Any]) -> tuple[Tensor, Tensor]:
    """Return predictions and targets of tests ``(n,)`` by the model of a run at one site that holds all data."""
    assembly = assemble(config)
    task = assembly.task
    site = build_site(LocalTask.open("pooled", task, Examples(own, tests), assembly.layout, config.seed))
    outcome, _ = run_assembly(config, assembly, {"pooled": site})
    model = task.model()
    model.load_state_dict(assembly.layout.unflatten(outcome.weights), strict=False)
    predictions, targets = task.measure_all(model, tests)
    return predictions[:, 0], targets[:, 0]


def run_size(network: str, share: float, fold: int, data: Path, volumes: Volumes) -> dict[str, Any]:
    """Return the errors of the tests of a fold, and the setting that the subjects set aside have chosen."""
    configs = [
        build_config(Arm(network, overrides=(*settings, "method.evaluate_every=30")), SEED, fold, data)
        for settings in SETTINGS[network]
    ]
    examples = volumes.split(configs[0], assemble(configs[0]).task).values()
    pool = ConcatDataset[Any]([own.train for own in examples])
    tests = ConcatDataset[Any]([own.test for own in examples])
    # The same order for all sizes and networks: a smaller training set is a part of a larger one.
    order = torch.randperm(len(pool), generator=make_generator(SEED, "curve", fold)).tolist()[: int(share * len(pool))]
    began, aside = time.process_time(), len(order) // 5
    errors = []
    for config in configs:
        predictions, targets = train(config, Subset(pool, order[aside:]), Subset(pool, order[:aside]))
        errors.append(float((predictions - targets).abs().mean()))
    chosen = int(np.argmin(errors))
    predictions, targets = train(configs[chosen], Subset(pool, order), tests)
    return {
        "network": network, "share": share, "fold": fold, "subjects": len(order), "validation": errors,
        "chosen": chosen, "errors": (predictions - targets).abs().tolist(), "seconds": time.process_time() - began,
    }  # fmt: skip


def format_interval(values: np.ndarray, *, sign: bool = False) -> str:
    """Return the mean over subjects with the 95 % interval of a bootstrap over them."""
    means = values[np.random.default_rng(SEED).integers(len(values), size=(DRAWS, len(values)))].mean(1)
    mark = "+" if sign else ""
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{values.mean():{mark}.2f} [{low:{mark}.2f}, {high:{mark}.2f}]"


def write_docs(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the table of the page."""
    lines = [
        "| training subjects | MLP, years [95 %] | CNN, years [95 %] | CNN minus MLP |",
        "| --- | --- | --- | --- |",
    ]  # fmt: skip
    for share in SHARES:
        found = {name: [row for row in rows if row["network"] == name and row["share"] == share] for name in SETTINGS}
        errors = {name: np.concatenate([row["errors"] for row in own]) for name, own in found.items()}
        subjects = round(float(np.mean([row["subjects"] for row in found["CNN"]])))
        cells = [*map(format_interval, errors.values()), format_interval(errors["CNN"] - errors["MLP"], sign=True)]
        lines.append(f"| {subjects} | {' | '.join(cells)} |")
    write_section("age", "brain_curve", "\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the BIDS data sets IXI-HH and NSK")
    parser.add_argument("--out", type=Path, default=Path("runs/brain_curve"))
    parser.add_argument("--folds", type=int, default=FOLDS, help="number of folds to run (default all)")
    parser.add_argument("--docs", action="store_true", help="update docs/results/age.md from the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    volumes, rows = Volumes(arguments.data), []
    for fold in range(1, arguments.folds + 1):
        for share in SHARES:
            for network in SETTINGS:
                file = arguments.out / f"{network}_{share:g}_{fold}.json"
                with claim(file) as is_claimed:
                    if is_claimed:
                        write_json(file, run_size(network, share, fold, arguments.data, volumes))
                rows.append(json.loads(file.read_text(encoding="utf-8")))
                row = rows[-1]
                error = np.mean(row["errors"])
                print(f"{network} {row['subjects']} fold {fold}: {error:.2f}, {row['seconds']:.0f} s", flush=True)
    if arguments.docs:
        write_docs(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
