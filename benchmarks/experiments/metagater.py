"""Adaptation of MetaGater and its baselines to target sites: CIFAR-10 with two classes per site, and brain age.

    python benchmarks/experiments/metagater.py cifar_small ../shared/data --rounds 120 --seeds 1 2 3
    python benchmarks/experiments/metagater.py cifar_main ../shared/data --rounds 30 --seeds 1 2 3
    python benchmarks/experiments/metagater.py brain ../shared/data --rounds 100 --seeds 1 2 3

Each run is one process without FLARE, ends with the same bits as a FLARE job, and writes one JSON file to ``--out``;
``metagater_report.py`` turns the files into docs/results/metagater.md and its plot. Target sites take no part in
training. MetaSNIP runs last: it needs the backbone of MetaGater without gates and the sparsity of MetaGater with gates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, TensorDataset

from flare_sparse.assemble import build_initial_model
from flare_sparse.data.partition import partition_by_site, partition_few_classes
from flare_sparse.data.tables import read_table
from flare_sparse.exchange import Assignment, Contribution, Patch, Request
from flare_sparse.federation import Evaluation
from flare_sparse.local.run import run_locally
from flare_sparse.mask import Mask
from flare_sparse.methods import METHODS
from flare_sparse.runs.model_files import read_model, save_model
from flare_sparse.task import Examples, SiteData, Task
from flare_sparse.tasks import TASKS
from flare_sparse.training import Site

EMPTY = TensorDataset(torch.zeros(0))
EXTRA_TESTS = 200
LASSO = 2e-5
OPEN_BIAS = 0.1


@dataclass(frozen=True)
class Arm:
    """One row of a table."""

    method: str
    gated: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """One table: sites, network and arms. ``common`` holds the settings of every arm."""

    task: str
    task_settings: dict[str, Any]
    layers: tuple[str, ...]
    participation: float
    common: dict[str, Any]
    arms: dict[str, Arm]
    sites: dict[str, int] = field(default_factory=dict)


LAMBDA = 0.2


def build_cifar_arms(batch: int) -> dict[str, Arm]:
    """Return the arms on CIFAR-10. Learning rates were chosen per method on seed 0, which is in no table.

    MetaGater's step is lambda times its learning rate.
    """
    sgd = {"optimizer": "sgd", "batch_size": batch}
    plain = {"training": {**sgd, "lr": 0.1}}
    proximal = {"training": {**sgd, "lr": 0.1 / LAMBDA}, "momentum_cap": 0.9, "adapt_lr": 0.03, "lasso": 0}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", settings={**plain, "adapt_lr": 0.03}),
        "Per-FedAvg (FO)": Arm("per_fedavg", settings={**plain, "adapt_lr": 0.01}),
        "MetaGater with gates": Arm("metagater", gated=True, settings={**proximal, "lasso": LASSO}),
        "MetaGater without gates": Arm("metagater", settings=proximal),
        "MetaSNIP": Arm("metasnip", settings={**proximal, "layers": ["2.0.conv"]}),
    }


CIFAR = {"image": (3, 32, 32), "classes": 10}
SMALL_NET = {"name": "image_cnn", "channels": [32, 64, 128]}
SETTINGS = {
    "cifar_small": Setting(
        "image_classification",
        {**CIFAR, "model": SMALL_NET},
        ("2",),
        0.5,
        {},
        build_cifar_arms(1000),
        {"sites": 20, "targets": 10, "smallest": 30, "largest": 100},
    ),
    "cifar_main": Setting(
        "image_classification",
        {**CIFAR, "model": SMALL_NET},
        ("2",),
        0.5,
        {},
        build_cifar_arms(64),
        {"sites": 40, "targets": 10, "smallest": 221, "largest": 2792},
    ),
}


def build_brain_arms() -> dict[str, Arm]:
    """Return the arms on scan sites. The network is an MLP without channels, so no arm has gates."""
    plain = {"optimizer": "sgd", "lr": 0.05, "batch_size": 32, "clip_norm": 1.0}
    steps = {"local_steps": 2}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", settings={"training": plain, **steps}),
        "FedAvg, an epoch a round, + one step": Arm(
            "fedavg_one_step", settings={"training": plain, "local_steps": None}
        ),
        "Per-FedAvg (FO)": Arm("per_fedavg", settings={"training": plain, **steps}),
        "MetaGater without gates": Arm(
            "metagater", settings={"training": {**plain, "lr": 0.25}, "momentum_cap": 0.9, **steps}
        ),
    }


SETTINGS["brain"] = Setting(
    "morphometry_age", {}, (), 0.5, {"adapt_lr": 0.05}, build_brain_arms(), {"targets": 10, "at_least": 20}
)


def build_task(setting: Setting, *, gated: bool) -> Task:
    settings = dict(setting.task_settings)
    if gated:
        settings["model"] = {**settings["model"], "gates": {"layers": list(setting.layers), "open_bias": OPEN_BIAS}}
    return TASKS[setting.task](settings)


def load_cifar_sites(setting: Setting, task: Task, data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return sites of two classes each, and the names of the target sites.

    Training sites have no test examples. A target has its own 20 % and up to ``EXTRA_TESTS`` images of its classes that
    no site holds, because the test examples of a target of 30 examples are too few.
    """
    path, counts = data / "cifar10" / "cifar10_jpeg.npz", dict(setting.sites)
    targets = counts.pop("targets")
    cohort = task.cohort(path)
    parts = partition_few_classes(cohort, counts.pop("sites") + targets, **counts, seed=seed)
    chosen = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()[:targets]
    held_out = sorted(sorted(parts)[i] for i in chosen)
    label = dict(zip(cohort.ids, cohort.columns["label"].tolist(), strict=True))
    taken = {name for ids in parts.values() for name in ids}
    examples = {}
    for name, ids in parts.items():
        own = task.load(SiteData(name, path, ids), seed)
        if name not in held_out:
            examples[name] = Examples(own.train, EMPTY)
            continue
        classes = {label[i] for i in ids}
        free = [i for i in cohort.ids if label[i] in classes and i not in taken]
        picked = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()[:EXTRA_TESTS]
        more = task.load(SiteData(name, path, tuple(free[i] for i in picked)), seed) if picked else None
        tests = [own.test, *([more.train, more.test] if more else [])]
        examples[name] = Examples(own.train, ConcatDataset(tests))
    return examples, held_out


def load_brain_sites(setting: Setting, task: Task, data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return the 49 scan sites of three cohorts; ten of those with at least 20 subjects are targets."""
    folder = data / "brain_morphometry"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "destrieux.npz"
        join_tables(sorted(folder.glob("destrieux_*.csv.gz")), path)
        parts = partition_by_site(task.cohort(path))
        examples = {name: task.load(SiteData(name, path, ids), seed) for name, ids in parts.items()}
    large = [name for name, ids in sorted(parts.items()) if len(ids) >= setting.sites["min_examples"]]
    drawn = torch.randperm(len(large), generator=torch.Generator().manual_seed(seed))[: setting.sites["targets"]]
    targets = sorted(large[i] for i in drawn.tolist())
    return {n: e if n in targets else Examples(e.train, EMPTY) for n, e in examples.items()}, targets


def join_tables(files: list[Path], path: Path) -> None:
    """Write the rows of all tables in their common columns; subjects and sites get their cohort as prefix."""
    tables = {file.name.removesuffix(".csv.gz").removeprefix("destrieux_"): read_table(file).columns for file in files}
    shared = set.intersection(*(set(columns) for columns in tables.values()))
    out = {name: np.concatenate([columns[name] for columns in tables.values()]) for name in sorted(shared)}
    for name in ("subject", "site"):
        texts = [[f"{cohort}-{value}" for value in columns[name]] for cohort, columns in tables.items()]
        out[name] = np.array([text for part in texts for text in part])
    np.savez(path, **out)


def run(setting: Setting, label: str, arm: Arm, data: Path, rounds: int, seed: int, out: Path) -> dict[str, Any]:
    """Train, adapt at the targets, and write figures and model to ``out``, where MetaSNIP finds its model."""
    task = build_task(setting, gated=arm.gated)
    load_sites = load_brain_sites if setting.task == "morphometry_age" else load_cifar_sites
    examples, targets = load_sites(setting, task, data, seed)
    layout, weights = build_initial_model(task, seed)
    common = {"rounds": rounds, "participation": setting.participation, "targets": targets, **setting.common}
    kind, settings = METHODS[arm.method], {**common, **arm.settings}
    if arm.method == "metasnip":
        gated = json.loads((out / f"MetaGater with gates-{seed}.json").read_text())
        settings["sparsity"] = min(max(gated["metrics"]["channel_sparsity"], 0.01), 0.99)
    method = kind(kind.Config.model_validate(settings), layout, seed)
    sites = {name: Site(name, task, own, layout, seed) for name, own in examples.items()}
    result = {"label": label, "seed": seed, "rounds": rounds, "arm": asdict(arm)}
    if arm.method == "metasnip":
        final = read_model(out / f"MetaGater without gates-{seed}.safetensors", layout)
        live, figures, trained = Mask.full(layout.size), evaluate_adapted(method, final, targets, sites), 0.0
    else:
        outcome, ledger = run_locally(method, weights, sites, task.metric)
        final, live, figures = outcome.weights, outcome.mask, outcome.evaluation.overall
        trained = sum(record.seconds for record in outcome.rounds if record.kind == "train")
        result |= {"live_share": live.count / live.size, "sites": outcome.evaluation.sites, **count_bytes(ledger)}
    save_model(out / f"{label}-{seed}.safetensors", layout, final)
    timed = time_adaptation(method, final, live, {name: sites[name] for name in targets})
    result |= {"metrics": figures, "training_s": trained, **timed}
    (out / f"{label}-{seed}.json").write_text(json.dumps(result, indent=1))
    return result


def sweep_adapt_lr(setting: Setting, data: Path, seed: int, rates: list[float], out: Path) -> None:
    """Adapt the trained models in ``out`` with other values of ``adapt_lr``."""
    for gated in (False, True):
        labels = [label for label, arm in setting.arms.items() if arm.gated is gated and arm.method != "metasnip"]
        files = {label: out / f"{label}-{seed}.safetensors" for label in labels}
        if not any(file.exists() for file in files.values()):
            continue
        task = build_task(setting, gated=gated)
        load_sites = load_brain_sites if setting.task == "morphometry_age" else load_cifar_sites
        examples, targets = load_sites(setting, task, data, seed)
        layout, _ = build_initial_model(task, seed)
        sites = {name: Site(name, task, examples[name], layout, seed) for name in targets}
        for label, file in files.items():
            if file.exists():
                arm, weights, errors = setting.arms[label], read_model(file, layout), {}
                for rate in rates:
                    settings = {**setting.common, **arm.settings, "adapt_lr": rate}
                    method = METHODS[arm.method](METHODS[arm.method].Config.model_validate(settings), layout, seed)
                    errors[str(rate)] = evaluate_adapted(method, weights, targets, sites)[task.metric.name]
                print(seed, label, errors, flush=True)
                (out / f"{label}-{seed}.sweep").write_text(json.dumps({"label": label, "seed": seed, "rates": errors}))


def evaluate_adapted(method: Any, weights: Any, targets: list[str], sites: dict[str, Site]) -> dict[str, float]:
    """Return the metrics of the method's final request, without the rounds before it."""
    updates = []
    for name in targets:
        sites[name].weights = weights.clone()
        request = Assignment(Request("adapt", 1, Patch.from_vector(weights, method.full_mask), method.full_mask))
        updates.append(Contribution.from_update(name, method.answer(request, sites[name])))
    return Evaluation.from_contributions(updates).overall


def time_adaptation(method: Any, weights: Any, live: Mask, targets: dict[str, Site]) -> dict[str, float]:
    """Return this thread's seconds of adaptation and of inference at all targets: the fastest of three."""
    adapting, inferring = [], []
    for _ in range(3):
        began, own = time.thread_time(), {}
        for name, site in targets.items():
            site.weights = weights.clone()
            own[name] = method.adapt(site, live)
        adapting.append(time.thread_time() - began)
        began = time.thread_time()
        for name, site in targets.items():
            site.evaluate(own[name])
        inferring.append(time.thread_time() - began)
    return {"adapt_s": min(adapting), "infer_s": min(inferring)}


def count_bytes(ledger: Any) -> dict[str, int]:
    lines = [line for line in ledger.lines if line.kind == "train"]
    return {"bytes": sum(x.payload_bytes for x in lines), "dense_bytes": sum(x.dense_bytes for x in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("data", type=Path, help="folder with cifar10/ and brain_morphometry/")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--sweep", type=float, nargs="+", help="do not train; adapt the models in --out with these adapt_lr"
    )
    parser.add_argument("--arms", nargs="+", help="labels of the arms; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/metagater"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting, out = SETTINGS[arguments.setting], arguments.out / arguments.setting
    out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        if arguments.sweep:
            sweep_adapt_lr(setting, arguments.data, seed, arguments.sweep, out)
            continue
        for label, arm in setting.arms.items():
            if not arguments.arms or label in arguments.arms:
                result = run(setting, label, arm, arguments.data, arguments.rounds, seed, out)
                print(seed, label, result["metrics"], f"{result['training_s']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
