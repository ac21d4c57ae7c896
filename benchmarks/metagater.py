"""MetaGater and its baselines: CIFAR-10 with two classes a site, and brain age at scan sites that nobody trained on.

    python benchmarks/metagater.py cifar_small ../shared/data --rounds 200 --seeds 1 2 3
    python benchmarks/metagater.py cifar_main ../shared/data --rounds 60 --seeds 1 2 3
    python benchmarks/metagater.py brain ../shared/data --rounds 200 --seeds 1 2 3
    python benchmarks/metagater.py report

Each run is one process without FLARE, with the bits that FLARE would end with, and leaves one JSON file in ``--out``.
``report`` turns these into ``docs/results/metagater.md`` and its figures. Target sites take no part in training.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import ConcatDataset, TensorDataset

from flare_sparse.data.partition import few_classes, natural
from flare_sparse.methods import METHODS
from flare_sparse.rehearsal import initial_weights, rehearse
from flare_sparse.task import Examples, SiteData, Task
from flare_sparse.tasks import TASKS
from flare_sparse.training import Site

EMPTY = TensorDataset(torch.zeros(0))
EXTRA_TESTS = 200


@dataclass(frozen=True)
class Arm:
    """One row of a table."""

    method: str
    gated: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """One table: sites, network, arms. ``common`` are settings of every arm."""

    task: str
    task_settings: dict[str, Any]
    layers: tuple[str, ...]
    participation: float
    common: dict[str, Any]
    arms: dict[str, Arm]
    sites: dict[str, int] = field(default_factory=dict)


def cifar(lr: float, adapt_lr: float, batch: int) -> dict[str, Arm]:
    """The arms on CIFAR-10; ``lr`` is that of one plain gradient step, which MetaGater reaches with lr / lambda."""
    plain = {"training": {"optimizer": "sgd", "lr": lr, "batch_size": batch}}
    proximal = {"training": {"optimizer": "sgd", "lr": lr / 0.2, "batch_size": batch}, "momentum_cap": 0.9}
    gates = {**proximal, "lasso": 5e-4}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", settings=plain),
        "Per-FedAvg (FO)": Arm("per_fedavg", settings=plain),
        "MetaGater without gates": Arm("metagater", settings=proximal),
        "MetaGater with gates": Arm("metagater", gated=True, settings=gates),
    }


CIFAR = {"image": (3, 32, 32), "classes": 10}
SMALL_NET = {"name": "image_cnn", "channels": [32, 64, 128]}
SETTINGS = {
    "cifar_small": Setting(
        "image_classification",
        {**CIFAR, "model": SMALL_NET},
        ("2",),
        0.5,
        {"adapt_lr": 0.1},
        cifar(0.1, 0.1, 1000),
        {"sites": 20, "targets": 10, "smallest": 30, "largest": 100},
    ),
    "cifar_main": Setting(
        "image_classification",
        {**CIFAR, "model": SMALL_NET},
        ("2",),
        0.4,
        {"adapt_lr": 0.1},
        cifar(0.1, 0.1, 64),
        {"sites": 50, "targets": 10, "smallest": 221, "largest": 2792},
    ),
}


def build_task(setting: Setting, *, gated: bool) -> Task:
    settings = dict(setting.task_settings)
    if gated:
        settings["model"] = {**settings["model"], "gates": {"layers": list(setting.layers)}}
    return TASKS[setting.task](settings)


def cifar_sites(setting: Setting, task: Task, data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Sites of two classes. Those that train have no test examples; a target has, beside its own 20 %, up to
    ``EXTRA_TESTS`` images of its classes that no site holds: a target of 30 examples alone would say little.
    """
    path, counts = data / "cifar10" / "cifar10_jpeg.npz", dict(setting.sites)
    targets = counts.pop("targets")
    cohort = task.cohort(path)
    parts = few_classes(cohort, counts.pop("sites") + targets, **counts, seed=seed)
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


def run(setting: Setting, label: str, arm: Arm, data: Path, rounds: int, seed: int) -> dict[str, Any]:
    task = build_task(setting, gated=arm.gated)
    examples, targets = cifar_sites(setting, task, data, seed)
    layout, weights = initial_weights(task, seed)
    kind = METHODS[arm.method]
    common = {"rounds": rounds, "participation": setting.participation, "targets": targets, **setting.common}
    method = kind(kind.Config.model_validate({**common, **arm.settings}), layout, seed)
    sites = {name: Site(name, task, own, layout, seed) for name, own in examples.items()}
    began = time.perf_counter()
    outcome, ledger = rehearse(method, weights, sites, task.metric)
    trained = sum(record.seconds for record in outcome.rounds if record.kind == "train")
    result = {
        "label": label,
        "seed": seed,
        "rounds": rounds,
        "arm": asdict(arm),
        "metrics": outcome.judgement.overall,
        "sites": outcome.judgement.sites,
        "training_s": trained,
        "seconds": time.perf_counter() - began,
        "live_share": outcome.mask.count / outcome.mask.size,
        **learning_seconds(method, outcome, {name: sites[name] for name in targets}),
        **sent(ledger),
    }
    return result


def learning_seconds(method: Any, outcome: Any, targets: dict[str, Site]) -> dict[str, float]:
    """Seconds of adaptation and of inference at all targets, the fastest of three."""
    adapting, inferring = [], []
    for _ in range(3):
        began, adapted = time.perf_counter(), {}
        for name, site in targets.items():
            site.weights = outcome.weights.clone()
            adapted[name] = method.adapt(site, outcome.mask)
        adapting.append(time.perf_counter() - began)
        began = time.perf_counter()
        for name, site in targets.items():
            site.judge(adapted[name])
        inferring.append(time.perf_counter() - began)
    return {"adapt_s": min(adapting), "infer_s": min(inferring)}


def sent(ledger: Any) -> dict[str, int]:
    lines = [line for line in ledger.lines if line.kind == "train"]
    return {"bytes": sum(x.payload_bytes for x in lines), "dense_bytes": sum(x.dense_bytes for x in lines)}
