"""Brain age at five sites: FedAvg, NeuroSFL and FedSparsify against linear models, single sites and pooled training.

    python benchmarks/experiments/brain_t1.py ../shared/data/brain_t1 [--seeds 1 2 3] [--out runs/brain_t1] [--docs]

IXI-HH is split at random into four sites, NSK is the fifth. Five folds at every site test every subject once per seed.
The settings are those of ``app_configs/*_voxels.yaml``, which validation examples chose; here no round and no setting
is chosen, and every figure is of the last model. Each run is one process without FLARE, uses the real wire, and writes
one JSON file: finished runs are not repeated, several processes may share the work, ``--minutes`` ends one early.
``--docs`` updates the tables of docs/results/age.md from the files.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from brain_t1_report import update_docs
from runs import CONFIGS, claim
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset

from flare_sparse.config.assemble import Assembly, assemble
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.inputs.scaling import InputScaler
from flare_sparse.results.runs.baselines import SiteRows, fit_baselines, label_rows
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.tasks.models.brain_age import HemisphereMean
from flare_sparse.tasks.models.registry import MODELS
from flare_sparse.tasks.models.shapes import Channels, Count, Volume
from flare_sparse.tasks.task import Examples, Task
from flare_sparse.training import LocalTask, Site, build_site
from flare_sparse.training.trainer import Trainer

FOLDS = 5


@dataclass(frozen=True)
class Arm:
    """One line of a table.

    Attributes:
        label: its name.
        config: configuration file.
        overrides: settings that differ from it.
        sites: which sites train together: ``all``; each of them ``alone``; or one that holds all data, ``pooled``.
        table: the table, if it is one of those with one fold a seed.
        is_linear: whether the line stands for the linear models instead.
    """

    label: str
    config: str = "fedavg_voxels"
    overrides: tuple[str, ...] = ()
    sites: str = "all"
    table: str = ""
    is_linear: bool = False

    @property
    def file_name(self) -> str:
        name = f"{self.table} {self.label}".strip()
        return name.replace(" ", "_").replace("%", "").replace(",", "").replace("'", "")


def build_masked(label: str, percent: int, *settings: str, table: str = "") -> Arm:
    overrides = (f"method.sparsity={percent / 100:g}", *settings)
    return Arm(f"{label} {percent} %", "neurosfl_voxels", overrides, table=table)


def build_pruned(percent: int, *settings: str, table: str = "") -> Arm:
    overrides = (f"method.sparsity={percent / 100:g}", *settings)
    return Arm(f"FedSparsify {percent} %", "fedsparsify_voxels", overrides, table=table)


LINEAR = Arm("baselines", is_linear=True)
ALONE = ("method.training.lr=0.01",)
MAIN = (
    Arm("FedAvg"),
    Arm("local only", overrides=ALONE, sites="alone"),
    *(build_masked("NeuroSFL", percent) for percent in (90, 95)),
    *(build_pruned(percent) for percent in (90, 95)),
    Arm("pooled", sites="pooled"),
)
RANDOM = ("method.scores=random", "method.training.lr=0.01")
SHUFFLED = ("method.scores=shuffled_snip", "method.training.lr=0.01")
LADDER = (
    *(build_masked("NeuroSFL", percent) for percent in (98, 99)),
    *(build_masked("shuffled SNIP", percent, *SHUFFLED) for percent in (90, 95, 98, 99)),
    *(build_masked("random mask", percent, *RANDOM) for percent in (90, 95, 98, 99)),
)

METHODS, UNIFORM, SKEWED, SEX, CNN = "methods", "uniform", "skewed", "sex", "cnn"
CNN_SETTINGS = ("method.training.lr=0.001", "method.training.weight_decay=0.1")
TRAINING = "{epochs: 1, batch_size: 16, optimizer: adamw, lr: 0.003, weight_decay: 1.0, schedule: {kind: cosine}}"


def list_methods(percent: int) -> Iterator[Arm]:
    """Yield variants of SNIP and other sparse methods. Their settings are NeuroSFL's: none was tuned."""
    scores = {
        "SNIP, progressive": ("method.scores=iter_snip", "method.iter_snip=progressive"),
        "SNIP, 10 minibatches": ("method.scores=iter_snip", "method.saliency_batches=1"),
        "SNIP, weighted by examples": ("method.scores=weighted_snip",),
        "SNIP of one site": ("method.scores=individual_snip", "method.random_site=true"),
        "IndividualSNIP": ("method.scores=individual_snip",),
        "random mask, ERK": (*RANDOM, "method.random_layers=erk"),
    }
    yield from (build_masked(label, percent, *settings, table=METHODS) for label, settings in scores.items())
    others = {
        "DisPFL": f"name: dispfl, sparsity: {percent / 100:g}",
        "top-k, error feedback": f"name: topk_ef, fraction: {1 - percent / 100:.2f}",
    }
    for label, text in others.items():
        yield Arm(
            f"{label} {percent} %",
            overrides=(f"method={{{text}, rounds: 30, training: {TRAINING}}}",),
            table=METHODS,
        )


def list_eight(table: str, partition: str) -> Iterator[Arm]:
    """Yield the arms of one of FedSparsify's environments: eight sites of the pooled subjects."""
    overrides = ("simulator.sites=8", f"simulator.data.partition={partition}")
    yield Arm("FedAvg", overrides=overrides, table=table)
    yield from (build_pruned(percent, *overrides, table=table) for percent in (85, 90, 95, 99))
    yield Arm("local only", overrides=(*overrides, *ALONE), sites="alone", table=table)


def list_sex() -> Iterator[Arm]:
    """Yield the arms that predict sex, with the settings that were found for age."""
    model = "model: {name: voxel_mlp, hidden: [64]}, downsample: 3, normalization: brain_first"
    task = f"task={{name: sex_classification, {model}}}"
    yield Arm("baselines", overrides=(task,), table=SEX, is_linear=True)
    yield Arm("FedAvg", overrides=(task,), table=SEX)
    yield Arm("local only", overrides=(task, *ALONE), sites="alone", table=SEX)
    yield Arm("pooled", overrides=(task,), sites="pooled", table=SEX)
    for percent in (90, 98):
        yield build_masked("NeuroSFL", percent, task, table=SEX)
        yield build_masked("random mask", percent, task, *RANDOM, table=SEX)
        yield build_pruned(percent, task, table=SEX)


def build_voxel_cnn(
    *,
    volume: Volume = (17, 21, 17),
    outputs: Count = 1,
    channels: Channels = (16, 32, 64, 64, 64),
    pooled: Count = 2,
    reduced: Count = 32,
) -> nn.Sequential:
    """Return FedSparsify's five 3x3x3 convolutions and a 1x1x1 one, on the voxels as ``voxel_mlp`` has them.

    Both hemispheres share weights, and each voxel is standardised by statistics of all sites. Then a mean over a region
    is a meaningful number, which instance normalisation would remove: there is none.
    """
    depth, *rest = volume
    half = ((depth + 1) // 2, *rest)
    layers: list[nn.Module] = [HemisphereMean(), nn.Flatten(), InputScaler([True] * prod(half))]
    layers.append(nn.Unflatten(1, (1, *half)))
    for number, (inputs, width) in enumerate(zip((1, *channels), channels, strict=False)):
        layers += [nn.Conv3d(inputs, width, 3, padding=1), *([nn.MaxPool3d(2)] if number < pooled else []), nn.ReLU()]
    layers += [nn.Conv3d(channels[-1], reduced, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(reduced * prod(size // 2**pooled for size in half), outputs))


MODELS["voxel_cnn"] = build_voxel_cnn


def list_cnn() -> Iterator[Arm]:
    """Yield a 3D-CNN and the MLP on the same voxels, with the settings that validation found for the CNN."""
    yield Arm("FedAvg, MLP", table=CNN)
    yield Arm("pooled, MLP", sites="pooled", table=CNN)
    model = "task.model={name: voxel_cnn}"
    yield Arm("FedAvg, CNN", overrides=(model, *CNN_SETTINGS), table=CNN)
    yield Arm("pooled, CNN", overrides=(model, *CNN_SETTINGS), sites="pooled", table=CNN)


MORE = {
    METHODS: (
        Arm(
            "FedAvg, fine-tuned",
            overrides=(f"method={{name: fedavg_ft, rounds: 30, training: {TRAINING.replace('0.003', '0.001')}}}",),
            table=METHODS,
        ),
        *list_methods(90),
        *list_methods(98),
    ),
    UNIFORM: tuple(list_eight(UNIFORM, "{kind: iid, sizes: uniform, seed: 1}")),
    SKEWED: tuple(list_eight(SKEWED, "{kind: age, sizes: skewed}")),
    SEX: tuple(list_sex()),
    CNN: tuple(list_cnn()),
}
"""Tables with one fold a seed."""


_Federation = dict[str, dict[str, tuple[Tensor, Tensor]]]
"""Volume and target of the subjects of every site."""


class Volumes:
    """The volumes of all sites, read once; a fold selects among them.

    Args:
        data: folder with the BIDS data sets IXI-HH and NSK.
    """

    def __init__(self, data: Path):
        self._data, self._items = data, dict[str, _Federation]()

    def split(self, config: RunConfig, task: Task) -> dict[str, Examples]:
        """Return the examples of every site in a fold."""
        assert config.simulator is not None, "the configuration names its data"
        key = f"{config.task.name} {config.simulator.sites} {config.simulator.data}"
        if key not in self._items:
            # One federation at a time stays in memory: its runs follow each other.
            self._items = {key: self._load(config, task)}
        return {name: self._select(items, config) for name, items in self._items[key].items()}

    def _load(self, config: RunConfig, task: Task) -> _Federation:
        items = _Federation()
        for name, where in prepare_site_data(config, task, Path()).items():
            own = task.load(where, config.seed)
            parts = ((own.train_ids, own.train), (own.test_ids, own.test))
            items[name] = {key: part[row] for keys, part in parts for row, key in enumerate(keys)}
        return items

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


def run(
    arm: Arm, seed: int, fold: int, data: Path, volumes: Volumes, wrap: Callable[[Trainer], Trainer] = lambda own: own
) -> dict[str, Any]:
    """Return the predictions for the test subjects of all sites, the bytes and the live entries of a run.

    ``wrap`` returns what trains at a site in the place of its trainer.
    """
    config = build_config(arm, seed, fold, data)
    assembly = assemble(config)
    examples = volumes.split(config, assembly.task)
    sites = {
        name: build_site(LocalTask.open(name, assembly.task, own, assembly.layout, seed))
        for name, own in examples.items()
    }
    sites = {name: Site(name, wrap(site.trainer)) for name, site in sites.items()}
    groups = {"all": sites}
    if arm.sites == "alone":
        # A federation of one site: the statistics of its voxels are its own, too.
        groups = {name: {name: site} for name, site in sites.items()}
    elif arm.sites == "pooled":
        train = ConcatDataset[Any]([own.train for own in examples.values()])
        first = next(iter(examples.values()))
        groups = {
            "all": {
                "pooled": build_site(
                    LocalTask.open("pooled", assembly.task, Examples(train, first.test), assembly.layout, seed)
                )
            }
        }
    began, rows, sent, dense = time.monotonic(), list[dict[str, Any]](), 0, 0
    for group in groups.values():
        outcome, ledger = run_assembly(config, assembly, group)
        sent += sum(line.payload_bytes for line in ledger.lines)
        dense += sum(line.dense_bytes for line in ledger.lines)
        if arm.sites == "pooled":
            for site in sites.values():
                site.evaluate(outcome.weights)
        rows += [row for site in (sites if arm.sites == "pooled" else group) for row in predict(sites[site])]
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


def predict(site: Site) -> Iterator[dict[str, Any]]:
    """Yield target and prediction of each test subject, by the model that the site evaluated last."""
    assert site.evaluated is not None, "every site evaluates its final model"
    layout, weights = site.evaluated
    model = site.trainer.task.model()
    model.load_state_dict(layout.unflatten(weights), strict=False)
    predictions, targets = site.trainer.task.measure_all(model, site.trainer.examples.test)
    values = (predictions > 0.5).float() if site.trainer.task.kind == "binary" else predictions
    yield from describe_subjects(site.name, site.trainer.examples, {"run": values.numpy()}, targets.numpy())


def describe_subjects(
    site: str, examples: Examples, predictions: Mapping[str, np.ndarray], targets: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Yield target and predictions of each test subject of a site, named by its rank among the site's identifiers."""
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
    first = next(part for name, part in parts.items() if name in live)
    # A convolution's weights belong to no voxel.
    if not statistics or first.dim() > 2:
        return live
    inside = first[:, statistics[0][3] > 0]
    return {**live, "inside the brain": [int(inside.sum()), inside.numel()]}


def run_baselines(arm: Arm, seed: int, fold: int, data: Path, volumes: Volumes) -> dict[str, Any]:
    """Return the predictions of the site means and of linear models on the same inputs."""
    config = build_config(arm, seed, fold, data)
    task = assemble(config).task
    examples = volumes.split(config, task)
    rows = {}
    for name, own in examples.items():
        tables = (task.tabulate_all(part) for part in (own.train, None, own.test))
        rows[name] = SiteRows(*(label_rows(name, x.double().numpy(), y.double().numpy()) for x, y in tables))
    predictions, start, subjects = fit_baselines(task.kind, rows), 0, list[dict[str, Any]]()
    for name, own in examples.items():
        part = {key: values[start : start + own.n_test] for key, values in predictions.items()}
        if task.kind == "binary":
            part = {key: (values > 0.5).astype(float) for key, values in part.items()}
        subjects += describe_subjects(name, own, part, rows[name].test.y)
        start += own.n_test
    return {"label": arm.label, "seed": seed, "fold": fold, "subjects": subjects}


def list_plan(seeds: list[int], tables: Collection[str]) -> Iterator[tuple[Arm, int, int]]:
    """Yield all runs. The arms that carry a claim come first, so that an interrupted experiment shows them."""
    arms: tuple[Arm, ...]
    for arms in ((LINEAR, *MAIN), LADDER) if "" in tables else ():
        yield from ((arm, seed, fold) for seed in seeds for fold in range(1, FOLDS + 1) for arm in arms)
    # One table after the other, each with its own federation.
    for table, arms in MORE.items():
        yield from ((arm, seed, 1) for seed in seeds for arm in arms if table in tables)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the BIDS data sets IXI-HH and NSK")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/brain_t1"))
    parser.add_argument(
        "--tables", nargs="+", choices=MORE, default=["", *MORE], help="of one fold a seed; default all"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no run after so many minutes")
    parser.add_argument("--docs", action="store_true", help="update docs/results/age.md from the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    began, volumes = time.monotonic(), Volumes(arguments.data)
    for arm, seed, fold in list_plan(arguments.seeds, arguments.tables):
        if time.monotonic() - began > 60 * arguments.minutes:
            return 1
        file = arguments.out / f"{arm.file_name}_{seed}_{fold}.json"
        with claim(file) as is_claimed:
            if not is_claimed:
                continue
            compute = run_baselines if arm.is_linear else run
            row = compute(arm, seed, fold, arguments.data, volumes) | {"table": arm.table}
            write_json(file, row)
        keys = [key for key in row["subjects"][0] if key not in ("site", "subject", "age")]
        errors = {key: np.mean([abs(s[key] - s["age"]) for s in row["subjects"]]) for key in keys}
        text = ", ".join(f"{key} {value:.2f}" for key, value in errors.items())
        print(f"seed {seed} fold {fold} {arm.table} {arm.label}: {text}; {row.get('seconds', 0):.0f} s", flush=True)
    if arguments.docs:
        tables = {table: [arm.label for arm in arms] for table, arms in MORE.items()}
        update_docs(arguments.out, [arm.label for arm in MAIN], [arm.label for arm in LADDER], tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
