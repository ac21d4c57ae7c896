"""Dice of the hippocampus with one nnU-Net plan: federations by method, pooled data, each site alone, nnU-Net itself.

Sites, splits and seeds are those of hippocampus.py, its cases in nnU-Net's raw layout; one plan is made from the
fingerprints of all sites. A model takes ``--rounds`` times ``--iterations`` steps in every row, with nnU-Net's
optimiser and learning rate; here the optimiser starts anew in every round. ``nnunet`` is nnU-Net's own trainer on the
pooled data with as many steps.

    python benchmarks/experiments/nnunet.py ../shared/data/hippocampus --runs runs/nnunet [--seeds 3]
        [--features 32] [--batch 2] [--rounds 8] [--iterations 40] [--rows fedavg pooled] [--curve] [--finished]

`--curve` measures every fourth test case of `pooled` and `fedavg` at the start of every round, into ``curve.jsonl`` of
the run's folder.

A killed call goes on from the last committed round when it is repeated; ``nnunet`` starts anew. Settings other than
rows and seeds need a folder of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from hippocampus import CONFIG, LINE, load_network, measure_cases, run_row
from hippocampus_report import print_report
from torch.utils.data import Subset

from flare_sparse.config.assemble import Assembly, assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.seeds import limit_threads
from flare_sparse.tasks.data.cases import find_cases
from flare_sparse.tasks.nnunet.fingerprint import SAMPLES, compute_fingerprint, merge_fingerprints
from flare_sparse.tasks.nnunet.plan import build_plan
from flare_sparse.tasks.task import SiteData
from flare_sparse.training import Site
from flare_sparse.training.private import SilentTrainer
from flare_sparse.training.trainer import Trainer, Training, Wrapper

DATASET = {
    "channel_names": {"0": "MRI"},
    "labels": {"background": 0, "anterior": 1, "posterior": 2},
    "file_ending": ".nii.gz",
}
NAME = "Dataset004_Hippocampus"
ROWS: dict[str, tuple[float, dict[str, Any]]] = {
    "pooled": (0.0, {"name": "fedavg"}),
    "fedavg": (0.0, {"name": "fedavg"}),
    "local_only": (0.0, {"name": "fedavg"}),
    "neurosfl": (0.9, {"name": "neurosfl", "sparsity": 0.9, "saliency_batches": 1}),
    "neurosfl_95": (0.95, {"name": "neurosfl", "sparsity": 0.95, "saliency_batches": 1}),
    "topk_ef": (0.9, {"name": "topk_ef", "fraction": 0.1}),
    "personal": (0.0, {"name": "fedavg", "personal": ["decoder.seg_layers.*"]}),
    "nnunet": (0.0, {"name": "fedavg"}),
}
"""Sparsity and method of each row."""


def write_raw(data: Path, seed: int, out: Path) -> dict[str, Path]:
    """Link the cases of hippocampus.py's sites in nnU-Net's raw layout; return the folders by site."""
    config = load_config(CONFIG, [f"seed={seed}", f"simulator.data.path={data.resolve()}"])
    files, folders = find_cases(data), {}
    for site, part in prepare_site_data(config, assemble(config).task, data).items():
        folder = folders[site] = out / f"raw-{seed}" / site
        for name in ("imagesTr", "labelsTr"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for case in part.subset or ():
            for place, file in (("imagesTr/{}_0000", files[case].images[0]), ("labelsTr/{}", files[case].labels)):
                link = folder / f"{place.format(case)}.nii.gz"
                if not link.exists():
                    link.symlink_to(Path(file).resolve())
        (folder / "dataset.json").write_text(json.dumps({**DATASET, "numTraining": len(part.subset or ())}))
    return folders


def plan_federation(options: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Any]:
    """Return the plan of all sites, made once for all runs, with ``--features`` in the network's first stage."""
    if not (file := options.runs / "plan.json").is_file():
        total = sum(len(list((folder / "labelsTr").iterdir())) for folder in folders.values())
        fingerprints = [compute_fingerprint(folder, SAMPLES // total) for folder in folders.values()]
        file.write_text(json.dumps(build_plan(merge_fingerprints(fingerprints), NAME)))
    plan: dict[str, Any] = json.loads(file.read_text())
    network = plan["plans"]["configurations"][options.configuration]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [width * options.features // 32 for width in network["features_per_stage"]]
    return plan


def write_config(
    options: argparse.Namespace, plan: dict[str, Any], row: str, seed: int, folders: dict[str, Path], folder: Path
) -> RunConfig:
    """Return the configuration of a row, with nnU-Net's training."""
    training = {
        "batch_size": options.batch or plan["plans"]["configurations"][options.configuration]["batch_size"],
        "optimizer": "sgd",
        "lr": options.lr,
        "momentum": options.momentum,
        "nesterov": True,
        "weight_decay": 3e-5,
        "clip_norm": 12,
        "schedule": {"kind": "poly"},
        "precision": options.precision,
    }
    config = {
        "name": "nnunet",
        "seed": seed,
        "method": {**ROWS[row][1], "rounds": options.rounds, "training": training},
        "task": {"name": "nnunet", "plan": plan, "configuration": options.configuration},
        "simulator": {"sites": len(folders), "data": {"path": "{site}"}},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text(json.dumps(config))
    return load_config(folder / "job.json")


class StepsTrainer(Wrapper):
    """Takes a fixed number of steps in a round, so that sites of different sizes take equally many.

    Args:
        inner: trains.
        steps: number of steps in a round.
        curve: measures the model at the start of a round.
    """

    def __init__(self, inner: Trainer, steps: int, curve: Callable[[Trainer, Training], None] = lambda *_: None):
        super().__init__(inner)
        self._steps, self._curve = steps, curve

    def train(self, training: Training) -> torch.Tensor:
        self._curve(self._inner, training)
        return self._inner.train(replace(training, steps=self._steps))


@torch.no_grad()
def append_curve(assembly: Assembly, file: Path, trainer: Trainer, training: Training) -> None:
    """Append the mean Dice of every fourth test case of a site at the start of a round."""
    if training.round == 1:
        return
    network, test = load_network(assembly, assembly.layout, training.start), trainer.examples.test
    cases = Subset(test, range(0, len(test), 4))  # type: ignore[arg-type]
    rows = [assembly.task.measure(network, batch)[0][0] for batch in assembly.task.iterate_batches(cases, 1)]
    line = {"rounds": training.round - 1, "cases": len(rows), "dice": float(torch.stack(rows).mean())}
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def print_curves(options: argparse.Namespace) -> None:
    """Print the mean Dice of the measured cases by number of steps and row, over all seeds; nothing without curves."""
    if not (files := sorted(options.runs.glob("*/curve.jsonl"))):
        return
    curves = pd.concat(pd.read_json(file, lines=True).assign(row=file.parent.name.rpartition("-")[0]) for file in files)
    # A killed call measures the round again that it had begun.
    curves["total"] = curves["dice"] * curves["cases"]
    sums = curves.groupby(["rounds", "row"])[["total", "cases"]].sum()
    table = (sums["total"] / sums["cases"]).unstack().round(3)
    table.index = pd.Index(table.index.astype(int) * options.iterations, name="steps")
    print("\n" + table.to_csv(sep="\t"))


def run_nnunet(options: argparse.Namespace, assembly: Assembly, sites: dict[str, Site], seed: int) -> dict[str, Any]:
    """Train nnU-Net's own trainer on the training cases of all sites; return what :func:`run_row` does."""
    folder = options.runs / f"own-{seed}"
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(folder / name)
    os.environ |= {"nnUNet_n_proc_DA": "0", "nnUNet_compile": "0"}
    from nnunetv2.training.dataloading.nnunet_dataset import nnUNetDatasetNumpy
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    task: Any = assembly.task
    plan, cases = task.config.plan, [case for site in sites.values() for case in site.trainer.examples.train]
    prepared = folder / "preprocessed" / NAME
    written = prepared / plan["plans"]["configurations"][options.configuration]["data_identifier"]
    written.mkdir(parents=True, exist_ok=True)
    (folder / "results").mkdir(exist_ok=True)
    for case in cases:
        nnUNetDatasetNumpy.save_case(case.image, case.labels, case.properties, str(written / case.name))
    names = [case.name for case in cases]
    (prepared / "splits_final.json").write_text(json.dumps([{"train": names, "val": names[:1]}]))
    # The trainer copies it to the result and reads nothing of it.
    (prepared / "dataset_fingerprint.json").write_text("{}")
    (prepared / "dataset.json").write_text(json.dumps({**DATASET, "numTraining": len(names)}))
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    start = time.perf_counter()
    plans = {**plan["plans"], "continue_training": False}
    if options.batch:
        plans["configurations"][options.configuration]["batch_size"] = options.batch
    trainer = nnUNetTrainer(
        plans,
        options.configuration,
        0,
        plan["dataset"],
        device=assembly.method.config.training.select_hardware().device,
    )
    trainer.num_epochs, trainer.num_iterations_per_epoch = options.rounds, options.iterations
    trainer.num_val_iterations_per_epoch, trainer.initial_lr = 1, options.lr
    trainer.initialize()
    for group in trainer.optimizer.param_groups:
        group["momentum"] = options.momentum
    trainer.run_training()
    weights = assembly.layout.flatten(trainer.network.state_dict())
    return {
        "sites": {name: measure_cases(assembly, site, weights) for name, site in sites.items()},
        "bytes": 0,
        "seconds": time.perf_counter() - start,
    }


def run(options: argparse.Namespace, row: str, seed: int, folder: Path) -> dict[str, Any]:
    """Run one row of one seed, or the rest of it, and return its line."""
    folders = write_raw(options.data, seed, options.runs)
    config = write_config(options, plan_federation(options, folders), row, seed, folders, folder)
    assembly = assemble(config)
    sites = {name: open_site(assembly, SiteData(name, path)) for name, path in folders.items()}
    if row == "nnunet":
        line = run_nnunet(options, assembly, sites, seed)
    else:
        curve = partial(append_curve, assembly, folder / "curve.jsonl")
        measures = options.curve and row in ("pooled", "fedavg")

        def wrap(trainer: Trainer) -> Trainer:
            return StepsTrainer(SilentTrainer(trainer), options.iterations, *([curve] if measures else []))

        line = run_row(row, config, assembly, sites, folder, wrap=wrap)
    measured = {
        site: {case: [float(np.mean(values)), *values] for case, values in cases.items()}
        for site, cases in line["sites"].items()
    }
    classes = [f"dice_{name}" for name in DATASET["labels"] if name != "background"]  # type: ignore[attr-defined]
    about = {"row": row, "sparsity": ROWS[row][0], "seed": seed, "metrics": ["dice", *classes]}
    return about | line | {"sites": measured}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--configuration", default="3d_fullres")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=40, help="steps of a model in a round")
    parser.add_argument("--features", type=int, default=32, help="features of the first stage; nnU-Net: 32")
    parser.add_argument("--batch", type=int, help="minibatch; default: the plan's")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.99)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--curve", action="store_true", help="measure pooled and fedavg in every round")
    parser.add_argument("--finished", action="store_true", help="print the finished runs and start none")
    options = parser.parse_args()
    lines = []
    with limit_threads(1):
        # Seed by seed, so that a series that is cut short has all rows.
        for seed, row in product(range(1, options.seeds + 1), options.rows):
            folder = options.runs / f"{row}-seed{seed}"
            if not (folder / LINE).is_file():
                if options.finished:
                    continue
                (folder / LINE).write_text(json.dumps(run(options, row, seed, folder)))
            lines.append(json.loads((folder / LINE).read_text()))
    print_report(lines)
    if options.curve:
        print_curves(options)


if __name__ == "__main__":
    main()
