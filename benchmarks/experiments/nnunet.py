"""An nnU-Net plan trained over three sites, on their pooled data and at each site alone, with the same iterations.

The hippocampus of docs/segmentation.md is written in nnU-Net's raw layout, a folder for each of its sites A, B and C;
`flare-sparse nnunet plan` plans for all of them.

    python benchmarks/experiments/nnunet.py ../shared/data/hippocampus --out runs/nnunet [--cases 16]
        [--configuration 3d_fullres] [--features 32] [--rounds 8] [--iterations 40] [--precision float32] [--seed 1]
        [--rows fedavg pooled local]

A model takes `--rounds` times `--iterations` steps in every row, with nnU-Net's optimiser and learning rate; the
optimiser starts anew in every round. A quarter of each site's cases are for testing. The result of a row is appended to
OUT/lines.jsonl.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset

from flare_sparse.config.assemble import Assembly, assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.core.seeds import limit_threads
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.results.runs.record import sum_traffic
from flare_sparse.rounds.local.run import Watcher
from flare_sparse.tasks.nnunet.fingerprint import SAMPLES, compute_fingerprint, merge_fingerprints
from flare_sparse.tasks.nnunet.plan import build_plan
from flare_sparse.tasks.task import Examples, SiteData
from flare_sparse.training import LocalTask, Site, build_site
from flare_sparse.training.subject_metrics import SilentTrainer
from flare_sparse.training.trainer import Trainer, Training, Wrapper
from flare_sparse.wire.ledger import Ledger

DATASET = {
    "channel_names": {"0": "MRI"},
    "labels": {"background": 0, "anterior": 1, "posterior": 2},
    "file_ending": ".nii.gz",
}


def write_raw(data: Path, out: Path, cases: int) -> dict[str, Path]:
    """Write the first cases of each site in nnU-Net's raw layout; return the folders by site."""
    with (data / "participants.tsv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    folders = {site: out / "raw" / site for site in sorted({row["site"] for row in rows})}
    for site, folder in folders.items():
        names = [row["participant_id"] for row in rows if row["site"] == site][:cases]
        for part in ("imagesTr", "labelsTr"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for name in names:
            image, labels = (next(data.glob(f"{where}{name}/anat/*.nii.gz")) for where in ("", "derivatives/*/"))
            shutil.copy(image, folder / "imagesTr" / f"{name}_0000.nii.gz")
            shutil.copy(labels, folder / "labelsTr" / f"{name}.nii.gz")
        (folder / "dataset.json").write_text(json.dumps({**DATASET, "numTraining": len(names)}))
    return folders


def write_config(options: argparse.Namespace, folders: dict[str, Path], out: Path) -> RunConfig:
    """Plan, and return the configuration of a federation."""
    total = sum(len(list((folder / "labelsTr").iterdir())) for folder in folders.values())
    fingerprints = [compute_fingerprint(folder, SAMPLES // total) for folder in folders.values()]
    plan = build_plan(merge_fingerprints(fingerprints), "Dataset004_Hippocampus")
    network = plan["plans"]["configurations"][options.configuration]["architecture"]["arch_kwargs"]
    network["features_per_stage"] = [width * options.features // 32 for width in network["features_per_stage"]]
    training = {
        "batch_size": plan["plans"]["configurations"][options.configuration]["batch_size"],
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
        "seed": options.seed,
        "method": {"name": "fedavg", "rounds": options.rounds, "training": training},
        "task": {"name": "nnunet", "plan": plan, "configuration": options.configuration, "split": {"test": 0.25}},
        "simulator": {"sites": len(folders), "data": {"path": str(out / "raw" / "{site}")}},
    }
    file = out / "config.yaml"
    file.write_text(json.dumps(config))
    return load_config(file)


class StepsTrainer(Wrapper):
    """Takes a fixed number of steps in a round, so that sites of different sizes take equally many."""

    def __init__(self, inner: Trainer, steps: int):
        super().__init__(inner)
        self._steps = steps

    def train(self, training: Training) -> torch.Tensor:
        return self._inner.train(replace(training, steps=self._steps))


def train(config: RunConfig, assembly: Assembly, sites: dict[str, Site], steps: int) -> tuple[torch.Tensor, int]:
    """Run FedAvg over some sites with ``steps`` steps in a round; return the weights and the bytes."""
    ledger, start = Ledger(), time.perf_counter()

    def report(line: Any) -> None:
        print(f"{'+'.join(sites)}: round {line.round}, {time.perf_counter() - start:.0f} s", flush=True)

    silent = {name: Site(name, StepsTrainer(SilentTrainer(site.trainer), steps)) for name, site in sites.items()}
    outcome, _ = run_assembly(config, assembly, silent, ledger=ledger, watcher=Watcher(on_round=report))
    return outcome.weights, sum(int(part["payload_bytes"]) for part in sum_traffic(ledger).values())


def pool(assembly: Assembly, sites: dict[str, Site], seed: int) -> Site:
    """Return a site with the training cases of all sites."""
    train_sets = ConcatDataset([site.trainer.examples.train for site in sites.values()])
    examples = Examples(train_sets, next(iter(sites.values())).trainer.examples.test)
    local = LocalTask.open("pooled", assembly.task, examples, assembly.layout, seed)
    return build_site(local)


def measure(assembly: Assembly, site: Site, weights: torch.Tensor) -> list[list[float]]:
    """Return the Dice of each class in each test case of a site."""
    network = assembly.task.model()
    network.load_state_dict(assembly.layout.unflatten(weights), strict=False)
    return assembly.task.measure_all(network, site.trainer.examples.test)[0].tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=16, help="cases of each site")
    parser.add_argument("--configuration", default="3d_fullres")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=40, help="steps of a model in a round")
    parser.add_argument("--features", type=int, default=32, help="features of the first stage; nnU-Net: 32")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--momentum", type=float, default=0.99)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", nargs="+", default=["fedavg", "pooled", "local"])
    options = parser.parse_args()
    folders = write_raw(options.data, options.out, options.cases)
    config = write_config(options, folders, options.out)
    with limit_threads(1):
        for row in options.rows:
            assembly, start = assemble(config), time.perf_counter()
            sites = {name: open_site(assembly, SiteData(name, folder)) for name, folder in folders.items()}
            groups = {"pooled": {"pooled": pool(assembly, sites, options.seed)}} if row == "pooled" else {"all": sites}
            if row == "local":
                groups = {name: {name: site} for name, site in sites.items()}
            models, sent = {}, 0
            for name, group in groups.items():
                models[name], count = train(config, assembly, group, options.iterations)
                sent += count if row == "fedavg" else 0
            seconds = time.perf_counter() - start
            common = next(iter(models.values()))
            dice = {name: measure(assembly, site, models.get(name, common)) for name, site in sites.items()}
            flat = torch.tensor([case for cases in dice.values() for case in cases])
            line = {
                "row": row,
                **{
                    key: getattr(options, key)
                    for key in ("configuration", "features", "cases", "rounds", "iterations", "seed")
                },
                "dice": float(flat.mean()),
                "classes": flat.mean(0).tolist(),
                "sites": {name: float(torch.tensor(cases).mean()) for name, cases in dice.items()},
                "cases_measured": dice,
                "bytes": sent,
                "seconds": round(seconds),
            }
            with (options.out / "lines.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps({key: value for key, value in line.items() if key != "cases_measured"}), flush=True)


if __name__ == "__main__":
    main()
