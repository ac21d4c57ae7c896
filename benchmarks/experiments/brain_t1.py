"""Brain age at five sites: FedAvg, NeuroSFL and FedSparsify against linear models, single sites and pooled training.

    python benchmarks/experiments/brain_t1.py ../shared/data/brain_t1 [--seeds 1 2 3] [--out runs/brain_t1] [--docs]

IXI-HH is split at random into four sites, NSK is the fifth. Five folds at every site test every subject once per seed.
The settings are those of ``app_configs/*_voxels.yaml``, which validation examples chose; here no round and no setting
is chosen, and every figure is of the last model. Each run is one process without FLARE, uses the real wire, and writes
one JSON file: finished runs are not repeated, several processes may share the work, ``--minutes`` ends one early.
``--docs`` updates the tables of docs/results/brain_t1.md from the files.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from brain_t1_report import update_docs
from results import CONFIGS, claim, run_rounds
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from flare_sparse.assemble import Assembly, assemble
from flare_sparse.cli.sites import prepare_site_data
from flare_sparse.config import RunConfig, load_config
from flare_sparse.federation import Outcome
from flare_sparse.runs.baselines import BaselineData, SiteRows, fit_baselines
from flare_sparse.structure.scaling import InputScaler
from flare_sparse.task import Examples, Task
from flare_sparse.training import Site

FOLDS = 5
BASELINES = "baselines"


@dataclass(frozen=True)
class Arm:
    """One line of a table.

    Attributes:
        label: its name.
        config: configuration file.
        overrides: settings that differ from it.
        sites: which sites train together: ``all``; each of them ``alone``; or one that holds all data, ``pooled``.
    """

    label: str
    config: str = "fedavg_voxels"
    overrides: tuple[str, ...] = ()
    sites: str = "all"

    @property
    def file_name(self) -> str:
        return self.label.replace(" ", "_").replace("%", "").replace(",", "").replace("'", "")


def build_masked(label: str, percent: int, *settings: str) -> Arm:
    return Arm(f"{label} {percent} %", "neurosfl_voxels", (f"method.sparsity={percent / 100:g}", *settings))


MAIN = (
    Arm("FedAvg"),
    Arm("local only", overrides=("method.training.lr=0.01",), sites="alone"),
    *(build_masked("NeuroSFL", percent) for percent in (90, 95)),
    *(Arm(f"FedSparsify {p} %", "fedsparsify_voxels", (f"method.sparsity={p / 100:g}",)) for p in (90, 95)),
    Arm("pooled", sites="pooled"),
)
RANDOM = ("method.scores=random", "method.training.lr=0.01")
SHUFFLED = ("method.scores=shuffled_snip", "method.training.lr=0.01")
LADDER = (
    *(build_masked("NeuroSFL", percent) for percent in (98, 99)),
    *(build_masked("shuffled SNIP", percent, *SHUFFLED) for percent in (90, 95, 98, 99)),
    *(build_masked("random mask", percent, *RANDOM) for percent in (90, 95, 98, 99)),
)


class Volumes:
    """The volumes of all sites, read once; a fold selects among them.

    Args:
        data: folder with the BIDS data sets IXI-HH and NSK.
    """

    def __init__(self, data: Path):
        self._data, self._items = data, dict[str, dict[str, tuple[Tensor, Tensor]]]()

    def split(self, config: RunConfig, task: Task) -> dict[str, Examples]:
        """Return the examples of every site in a fold."""
        if not self._items:
            for name, where in prepare_site_data(config, task, Path()).items():
                own = task.load(where, config.seed)
                parts = ((own.train_ids, own.train), (own.test_ids, own.test))
                self._items[name] = {key: part[row] for keys, part in parts for row, key in enumerate(keys)}
        return {name: self._select(items, config) for name, items in self._items.items()}

    def _select(self, items: Mapping[str, tuple[Tensor, Tensor]], config: RunConfig) -> Examples:
        split = config.task.config.split.assign(items, config.seed)
        train, test = (_Subjects([items[key] for key in keys]) for keys in (split.train, split.test))
        return Examples(train, test, train_ids=split.train, test_ids=split.test)


class _Subjects(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, items: list[tuple[Tensor, Tensor]]):
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._items[index]


def build_config(arm: Arm, seed: int, fold: int, data: Path) -> RunConfig:
    """Return the configuration of one run."""
    return load_config(
        CONFIGS / f"{arm.config}.yaml",
        [
            *arm.overrides,
            f"seed={seed}",
            f"task.split={{folds: {FOLDS}, fold: {fold}}}",
            f"simulator.data.path={data.resolve()}",
        ],
    )


def run(arm: Arm, seed: int, fold: int, data: Path, volumes: Volumes) -> dict[str, Any]:
    """Return the predictions for the test subjects of all sites, the bytes and the live entries of a run."""
    config = build_config(arm, seed, fold, data)
    assembly = assemble(config)
    examples = volumes.split(config, assembly.task)
    sites = {name: Site(name, assembly.task, own, assembly.layout, seed) for name, own in examples.items()}
    groups = {"all": sites}
    if arm.sites == "alone":
        # A federation of one site: the statistics of its voxels are its own, too.
        groups = {name: {name: site} for name, site in sites.items()}
    elif arm.sites == "pooled":
        train = ConcatDataset[Any]([own.train for own in examples.values()])
        first = next(iter(examples.values()))
        groups = {"all": {"pooled": Site("pooled", assembly.task, Examples(train, first.test), assembly.layout, seed)}}
    began, rows, sent, dense = time.monotonic(), list[dict[str, Any]](), 0, 0
    for group in groups.values():
        outcome, ledger = run_rounds(config, assembly, group)
        sent += sum(line.payload_bytes for line in ledger.lines)
        dense += sum(line.dense_bytes for line in ledger.lines)
        members = sites if arm.sites == "pooled" else group
        rows += [row for name in members for row in predict(assembly, outcome, name, examples[name])]
    facts = {"label": arm.label, "seed": seed, "fold": fold, "rounds": config.method.config.rounds, "subjects": rows}
    figures = {"bytes": sent, "dense_bytes": dense, "curve": trace(outcome)} if arm.sites == "all" else {}
    return {**facts, **figures, "live": count_live(assembly, outcome), "seconds": time.monotonic() - began}


def trace(outcome: Outcome) -> list[tuple[int, float]]:
    """Return bytes sent so far and the error of the model that they made, of every round."""
    points, sent = [], 0
    for record in outcome.rounds:
        # The first request of a round carries the model of the round before, which the sites evaluate.
        if (error := record.evaluation.overall.get("mae")) is not None:
            points.append((sent, error))
        sent += record.bytes_down + record.bytes_up
    return points


def predict(assembly: Assembly, outcome: Outcome, site: str, examples: Examples) -> Iterator[dict[str, Any]]:
    """Yield age and prediction of each test subject of a site, named by its rank among the site's identifiers."""
    model = assembly.task.model()
    model.load_state_dict(assembly.layout.unflatten(outcome.weights), strict=False)
    predictions, targets = assembly.task.measure_all(model, examples.test)
    yield from describe_subjects(site, examples, {"run": predictions.numpy()}, targets.numpy())


def describe_subjects(
    site: str, examples: Examples, predictions: Mapping[str, np.ndarray], targets: np.ndarray
) -> Iterator[dict[str, Any]]:
    rank = {name: number for number, name in enumerate(sorted([*examples.train_ids, *examples.test_ids]))}
    for row, name in enumerate(examples.test_ids):
        values = {key: float(value[row, 0]) for key, value in predictions.items()}
        yield {"site": site, "subject": rank[name], "age": float(targets[row, 0]), **values}


def count_live(assembly: Assembly, outcome: Outcome) -> dict[str, list[int]]:
    """Return live and all entries of every weight tensor, and of the first one those on voxels that vary."""
    parts = assembly.layout.unflatten(outcome.mask.bits)
    live = {name: [int(part.sum()), part.numel()] for name, part in parts.items() if name.endswith("weight")}
    statistics = [
        assembly.layout.unflatten(outcome.weights)[f"{name}.statistics"]
        for name, module in assembly.task.model().named_modules()
        if isinstance(module, InputScaler)
    ]
    if not statistics:
        return live
    first = next(part for name, part in parts.items() if name in live)
    inside = first[:, statistics[0][3] > 0]
    return {**live, "inside the brain": [int(inside.sum()), inside.numel()]}


def run_baselines(seed: int, fold: int, data: Path, volumes: Volumes) -> dict[str, Any]:
    """Return the predictions of the site means and of ridge regressions on the same inputs."""
    config = build_config(MAIN[0], seed, fold, data)
    task = assemble(config).task
    examples = volumes.split(config, task)
    rows = {}
    for name, own in examples.items():
        tables = (task.tabulate_all(part) for part in (own.train, None, own.test))
        rows[name] = SiteRows(*(BaselineData(x.double().numpy(), y.double().numpy()) for x, y in tables))
    predictions, start, subjects = fit_baselines("regression", rows), 0, list[dict[str, Any]]()
    for name, own in examples.items():
        part = {key: values[start : start + own.n_test] for key, values in predictions.items()}
        subjects += describe_subjects(name, own, part, rows[name].test.y)
        start += own.n_test
    return {"label": BASELINES, "seed": seed, "fold": fold, "subjects": subjects}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the BIDS data sets IXI-HH and NSK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/brain_t1"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many minutes")
    parser.add_argument("--docs", action="store_true", help="update docs/results/brain_t1.md from the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, volumes = time.monotonic(), Volumes(arguments.data)
    # The arms that carry a claim come first, so that an interrupted experiment shows them.
    plan = [
        (arm, seed, fold)
        for arms in ((None, *MAIN), LADDER)
        for seed in arguments.seeds
        for fold in range(1, FOLDS + 1)
        for arm in arms
    ]
    for arm, seed, fold in plan:
        if time.monotonic() - began > 60 * arguments.minutes:
            return 1
        file = arguments.out / f"{arm.file_name if arm else BASELINES}_{seed}_{fold}.json"
        with claim(file) as is_claimed:
            if not is_claimed:
                continue
            settings = seed, fold, arguments.data, volumes
            row = run(arm, *settings) if arm else run_baselines(*settings)
            part = file.with_suffix(".new")
            part.write_text(json.dumps(row) + "\n")
            part.replace(file)
        keys = [key for key in row["subjects"][0] if key not in ("site", "subject", "age")]
        errors = {key: np.mean([abs(s[key] - s["age"]) for s in row["subjects"]]) for key in keys}
        text = ", ".join(f"{key} {value:.2f}" for key, value in errors.items())
        print(f"seed {seed} fold {fold} {row['label']}: {text}; {row.get('seconds', 0):.0f} s", flush=True)
    if arguments.docs:
        update_docs(arguments.out, [arm.label for arm in MAIN], [arm.label for arm in LADDER])
    return 0


if __name__ == "__main__":
    sys.exit(main())
