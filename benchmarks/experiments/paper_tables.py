"""Tables and figures of the five papers that no other experiment has: one row of ARMS a line, one page a paper.

    python benchmarks/experiments/paper_tables.py ../shared/data [--only scbf_rates] [--seeds 1 2 3] [--docs]

Each row is a configuration of ``app_configs`` or of this folder with settings of its own. It runs once for each seed in
this process, through the real wire. A run writes one JSON file to ``--out``: finished runs are not repeated and several
processes may share the work. Times are of the processor, one thread, so that a busy machine changes them little.
``--docs`` writes the tables and figures of ``docs/papers/`` from the files. LoRA-A2's rows need the encoder
all-MiniLM-L6-v2 in ``$FLARE_SPARSE_MODELS``.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from page_tables import write_section
from runs import CONFIGS, claim
from torch.utils.data import ConcatDataset

import flare_sparse as fs
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.results.audit.membership import attack_between_sites
from flare_sparse.results.audit.training import compute_gradient_features
from flare_sparse.results.runs.cost import measure_cost
from flare_sparse.results.runs.load import load_study, load_trained_model

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
IMAGES = HERE.parents[1] / "docs" / "images"
SPARSITIES = (0.85, 0.9, 0.95, 0.99)
Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        label: its name.
        settings: settings that differ from those of the table; values as in YAML.
        paper: what the paper prints, by column.
    """

    label: str
    settings: tuple[str, ...] = ()
    paper: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    """One table or figure of a paper.

    Attributes:
        paper: name of its page.
        config: configuration file.
        data: path below the folder of cohorts.
        settings: settings of all rows.
        rows: its lines.
        columns: name of each column, and the figure of a run in it.
        is_attacked: whether the sites attack each other's training examples.
    """

    paper: str
    config: str
    data: str
    settings: tuple[str, ...]
    rows: tuple[Row, ...]
    columns: Mapping[str, Callable[[Record], float]]
    is_attacked: bool = False


def get_metric(name: str) -> Callable[[Record], float]:
    return lambda record: float(record["metrics"][name])


def get_percent(name: str) -> Callable[[Record], float]:
    return lambda record: 100 * float(record["metrics"][name])


def get_attack(name: str) -> Callable[[Record], float]:
    return lambda record: float(record["attack"][name])


SCBF_UPDATES = 60 * 5
"""Updates of all rounds and sites of SCBF's tables."""
COLUMNS: dict[str, Callable[[Record], float]] = {
    "AUC-ROC": get_metric("auc"),
    "AUC-PR": get_metric("auc_pr"),
    "accuracy, %": get_percent("accuracy"),
    "F1": get_metric("f1"),
    "MAE": get_metric("mae"),
    "attack accuracy": get_attack("accuracy"),
    "attacks above 0.5": get_attack("above_half"),
    "live": lambda record: record["model"]["live"],
    "file, bytes": lambda record: record["model"]["bytes"],
    "scalars sent, M": lambda record: (record["up"]["scalars_sent"] + record["down"]["scalars_sent"]) / 1e6,
    "MB sent": lambda record: (record["up"]["payload_bytes"] + record["down"]["payload_bytes"]) / 1e6,
    "MB up": lambda record: record["up"]["payload_bytes"] / 1e6,
    "uploaded, %": lambda record: 100 * record["up"]["scalars_sent"] / (SCBF_UPDATES * record["model"]["parameters"]),
    "examples a second": lambda record: record["examples_per_second"],
    "processor, s": lambda record: record["seconds"],
}
DIGITS = {"AUC-ROC": 3, "AUC-PR": 3, "F1": 3, "attack accuracy": 3, "MAE": 2, "accuracy, %": 1, "uploaded, %": 0}
DIGITS |= {"live": 0, "file, bytes": 0, "attacks above 0.5": 0, "examples a second": 1, "processor, s": 1}


def choose(*names: str) -> dict[str, Callable[[Record], float]]:
    return {name: COLUMNS[name] for name in names}


def pick(columns: Sequence[str], line: str) -> dict[str, str]:
    """Return the paper's figures of a row by column."""
    return dict(zip(columns, line.split(), strict=True))


SCBF_SETTINGS = ("simulator.sites=5", "simulator.data.partition={kind: iid}", "method.rounds=60")
SCBF_COLUMNS = choose("AUC-ROC", "AUC-PR", "uploaded, %", "MB up", "processor, s")
SCBF_PRINTED = ("AUC-ROC", "AUC-PR", "processor, s")
TRAINING = "training: {epochs: 5, batch_size: 32, optimizer: sgd, lr: 0.01}"


def build_pruned(rate: float, theta: float, stop: str) -> tuple[str, ...]:
    return (f"method={{name: scbfwp, rate: {rate}, pruning_rate: {theta}, {stop}, rounds: 60, {TRAINING}}}",)


def list_scbf_rates() -> tuple[Row, ...]:
    """Return SCBFwP at ten update rates (Tables 2 and 7)."""
    printed = """0.9776 0.9695  8339
                 0.9772 0.9686  8545
                 0.9777 0.9697  8469
                 0.9768 0.9604  7987
                 0.9780 0.9695  8359
                 0.9774 0.9682 12577
                 0.9774 0.9688  9278
                 0.9781 0.9703 11462
                 0.9774 0.9676 13169
                 0.9775 0.9685 13030"""
    return tuple(
        Row(f"{10 * n} %", build_pruned(n / 10, 0.1, "prunings: 6"), pick(SCBF_PRINTED, line))
        for n, line in enumerate(printed.splitlines(), 1)
    )


def list_scbf_prunings() -> tuple[Row, ...]:
    """Return SCBFwP at pruning rates up to half of the units, and at one rate up to six prunings (Tables 4, 5, 8)."""
    printed = """0.9765 0.9661 11144
                 0.9730 0.9568  8561
                 0.9763 0.9662 11852
                 0.9693 0.9465  8389
                 0.9769 0.9663 12000
                 0.9769 0.9731 25755
                 0.9797 0.9722 22717
                 0.9795 0.9725 17579
                 0.9789 0.9714 15909
                 0.9781 0.9703  8050
                 0.9778 0.9697  8469"""
    stops = [(f"{10 * n} % a pruning, 50 % in all", n / 10, "target_pruned_fraction: 0.5") for n in range(1, 6)]
    stops += [(f"10 % a pruning, {100 * (1 - 0.9**n):.0f} % in all", 0.1, f"prunings: {n}") for n in range(1, 7)]
    return tuple(
        Row(label, build_pruned(0.3, theta, stop), pick(SCBF_PRINTED, line))
        for (label, theta, stop), line in zip(stops, printed.splitlines(), strict=True)
    )


def list_scbf_methods() -> tuple[Row, ...]:
    """Return SCBF and averaging, with and without pruning (Tables 1, 3 and 6, Figure 6)."""
    printed = {
        "averaging": ("name: fedavg", "0.9821 0.9731 8679 100"),
        "averaging with pruning": ("name: fawp, prunings: 6", "0.9809 0.9683 4508 -"),
        "SCBF 30 %": ("name: scbf, rate: 0.3", "0.9825 0.9763 19696 45"),
        "SCBF 30 % with pruning": ("name: scbfwp, rate: 0.3, prunings: 6", "0.9776 0.9694 8469 15"),
    }
    return tuple(
        Row(label, (f"method={{{method}, rounds: 60, {TRAINING}}}",), pick((*SCBF_PRINTED, "uploaded, %"), line))
        for label, (method, line) in printed.items()
    )


SEX = "{name: sex_classification, model: {name: voxel_mlp, hidden: [64]}, downsample: 3, normalization: brain_first}"
VOXELS = "training: {epochs: 1, batch_size: 16, optimizer: adamw, lr: %s, weight_decay: 1.0, schedule: {kind: cosine}}"


SEX_TABLE = (
    "task={name: table, kind: binary, target: sex, features: [destrieux], id: subject, scaling: freesurfer, "
    "model: {name: mlp, hidden: [128, 64]}, split: {test: 0.2}}"
)


def list_neurosfl() -> tuple[Row, ...]:
    """Return sparse methods at five sparsities and the dense ones (Table 1)."""
    printed = {
        "NeuroSFL": ("name: neurosfl", 0.003, "92.52 92.4 88.19 87.5 71.18"),
        "DisPFL": ("name: dispfl", 0.003, "85.24 79.78 76.00 74.01 62.12"),
        "IndividualSNIP": ("name: neurosfl, scores: individual_snip", 0.003, "91.59 80.20 52.37 51.04 52.70"),
        "global random mask": ("name: neurosfl, scores: random", 0.003, "90.39 89.20 84.48 71.44 47.53"),
    }
    rows = [
        Row(
            f"{label} {percent} %",
            (f"method={{{method}, sparsity: {percent / 100}, rounds: 30, {VOXELS % lr}}}",),
            {"accuracy, %": paper},
        )
        for label, (method, lr, figures) in printed.items()
        for percent, paper in zip((0, 50, 80, 90, 95), figures.split(), strict=True)
    ]
    rows += [
        Row("FedAvg-FT", (f"method={{name: fedavg_ft, rounds: 30, {VOXELS % 0.001}}}",), {"accuracy, %": "92.1"}),
        Row("FedAvg", (f"method={{name: fedavg, rounds: 30, {VOXELS % 0.001}}}",), {"accuracy, %": "90.5"}),
    ]
    return tuple(rows)


def list_neurosfl_scores() -> tuple[Row, ...]:
    """Return IterSNIP and WeightedSNIP at 50 % (Table 2)."""
    variants = {
        f"IterSNIP, {n}": (f"scores: iter_snip, iterations: {n}", p)
        for n, p in ((1, "92.40"), (10, "91.82"), (20, "92.67"))
    }
    variants["WeightedSNIP"] = ("scores: weighted_snip", "92.10")
    return tuple(
        Row(
            label,
            (f"method={{name: neurosfl, {scores}, sparsity: 0.5, rounds: 30, {VOXELS % 0.003}}}",),
            {"accuracy, %": paper},
        )
        for label, (scores, paper) in variants.items()
    )


def list_neurosfl_clients() -> tuple[Row, ...]:
    """Return NeuroSFL at 10, 20 and 30 sites whose classes are drawn from Dir(0.3) (Figures 4 to 6)."""
    training = "training: {epochs: 5, batch_size: 16, optimizer: adamw, lr: 0.001, weight_decay: 0.1}"
    rows = []
    for sites, low in ((10, "0.848 to 0.921"), (20, "at least 0.792"), (30, "at least 0.764")):
        for percent in (0, 50, 80, 90, 95):
            method = f"{{name: neurosfl, sparsity: {percent / 100}, saliency_batches: null, rounds: 20, {training}}}"
            settings = (f"simulator.sites={sites}", f"method={method}")
            rows.append(Row(f"{sites} sites, {percent} %", settings, {"F1": low}))
    return tuple(rows)


def list_cifar() -> tuple[Row, ...]:
    """Return a dense network and NeuroSFL at 50 % (SSFL's table of CIFAR-10)."""
    rounds = "rounds: 50, participation: 0.1, evaluate_every: 50"
    training = "training: {epochs: 1, batch_size: 16, optimizer: sgd, lr: 0.1, lr_decay: 0.998}"
    arms = {
        "FedAvg": ("name: fedavg", "86.04"),
        "NeuroSFL, 50 %": ("name: neurosfl, sparsity: 0.5", "88.29"),
    }
    return tuple(
        Row(label, (f"method={{{method}, {rounds}, {training}}}",), {"accuracy, %": paper})
        for label, (method, paper) in arms.items()
    )


def list_sparsities(settings: str) -> tuple[Row, ...]:
    """Return FedSparsify with some settings at each sparsity, after the dense model of 20 rounds."""
    training = "training: {epochs: 4, batch_size: 8, optimizer: adam, lr: 1e-3}"
    rows = [Row("dense", (f"method={{name: fedavg, rounds: 20, {training}}}",))]
    for share in SPARSITIES:
        method = f"{{name: fedsparsify, sparsity: {share}, prunable: all_trainable, {settings}, {training}}}"
        rows.append(Row(f"{share:.0%}", (f"method={method}",)))
    return tuple(rows)


ROUND_BY_ROUND = "rounds: 20"
AT_THE_END = "first_round: 18, rounds: 18, finetune: {epochs: 8}"
"""One site prunes once, after 72 of 80 epochs (Figure 3)."""


def list_fedsparsify_table() -> tuple[Row, ...]:
    """Return the rows of FedSparsify's Table 1, Skewed & IID."""
    names = (
        "live",
        "file, bytes",
        "scalars sent, M",
        "MAE",
        "attack accuracy",
        "attacks above 0.5",
        "examples a second",
    )
    printed = (
        "2,950,401 10.85M 1888 2.879 0.66 50 64.31",
        "442,561 2.09M 714 2.881 0.671 52 69.06",
        "295,041 1.43M 645 2.859 0.672 51 71.28",
        "147,521 0.73M 576 2.861 0.659 54 78.27",
        "29,505 0.16M 521 3.024 0.596 47 128.55",
    )
    return tuple(
        Row(row.label, row.settings, pick(names, line))
        for row, line in zip(list_sparsities(ROUND_BY_ROUND), printed, strict=True)
    )


ENVIRONMENTS = {
    "uniform_iid": "{kind: iid, sizes: uniform, seed: 1}",
    "uniform_age": "{kind: age, sizes: uniform}",
    "skewed_iid": "{kind: iid, sizes: skewed, seed: 1}",
    "skewed_age": "{kind: age, sizes: skewed}",
}
MLP = "task.model={name: voxel_mlp, hidden: [64]}"
BRAIN_MLP = (MLP, "task.downsample=3", "task.normalization=brain_first")


def list_lora() -> tuple[Row, ...]:
    """Return LoRA-A2 by rank, factor, ratio of the learning rates, criterion and alpha."""
    settings = {f"rank {rank}": f"rank: {rank}" for rank in (1, 2, 4, 8)}
    settings |= {"rank 2, B alone": "rank: 2, schedule: b_only"}
    settings |= {f"rank 2, ratio {ratio}": f"rank: 2, b_lr_ratio: {ratio}" for ratio in (1, 2, 10)}
    settings |= {f"rank 2, {score}": f"rank: 2, score: {score}" for score in ("magnitude", "sensitivity", "random")}
    rows = [Row(label, (lora_method(text),)) for label, text in settings.items()]
    for alpha in (0.5, 1.0):
        for rank in (1, 8):
            partition = f"simulator.data.partition.alpha={alpha}"
            rows.append(Row(f"rank {rank}, Dirichlet {alpha:g}", (lora_method(f"rank: {rank}"), partition)))
    return tuple(rows)


def lora_method(text: str) -> str:
    training = "training: {epochs: 2, batch_size: 32, optimizer: adamw, lr: 3e-3, weight_decay: 0.01}"
    return f"method={{name: lora_a2, {text}, rounds: 8, {training}}}"


LORA_SETTINGS = ("simulator.sites=4", "task.max_length=20", "task.split={test: 0.3}")
TABLES: dict[str, Table] = {
    "scbf_methods": Table(
        "scbf", "scbf_mortality", "eicu_demo/mortality.npz", SCBF_SETTINGS, list_scbf_methods(), SCBF_COLUMNS
    ),
    "scbf_rates": Table(
        "scbf", "scbf_mortality", "eicu_demo/mortality.npz", SCBF_SETTINGS, list_scbf_rates(), SCBF_COLUMNS
    ),
    "scbf_prunings": Table(
        "scbf", "scbf_mortality", "eicu_demo/mortality.npz", SCBF_SETTINGS, list_scbf_prunings(), SCBF_COLUMNS
    ),
    "neurosfl_sparsity": Table(
        "neurosfl", "neurosfl_voxels", "brain_t1", (f"task={SEX}",), list_neurosfl(), choose("accuracy, %", "MB sent")
    ),
    "neurosfl_scores": Table(
        "neurosfl",
        "neurosfl_voxels",
        "brain_t1",
        (f"task={SEX}",),
        list_neurosfl_scores(),
        choose("accuracy, %", "MB sent"),
    ),
    "neurosfl_clients": Table(
        "neurosfl",
        "neurosfl_morphometry_age",
        "brain_morphometry/destrieux_fcon1000.csv.gz",
        (
            SEX_TABLE,
            "simulator.data.partition={kind: dirichlet, column: sex, alpha: 0.3}",
        ),
        list_neurosfl_clients(),
        choose("F1", "accuracy, %", "MB sent"),
    ),
    "neurosfl_cifar": Table(
        "neurosfl",
        "fedavg_one_step_cifar10",
        "cifar10/cifar10_jpeg.npz",
        ("simulator.sites=100", "simulator.data.partition={kind: dirichlet, column: label, alpha: 0.3}"),
        list_cifar(),
        choose("accuracy, %", "MB sent"),
    ),
    "fedsparsify_table": Table(
        "fedsparsify",
        "membership",
        "brain_t1",
        ("simulator.data.partition={kind: iid, sizes: skewed, seed: 1}",),
        list_fedsparsify_table(),
        choose(
            "live", "file, bytes", "scalars sent, M", "MAE", "attack accuracy", "attacks above 0.5", "examples a second"
        ),
        is_attacked=True,
    ),
    **{
        f"fedsparsify_{name}": Table(
            "fedsparsify",
            "membership",
            "brain_t1",
            (*BRAIN_MLP, f"simulator.data.partition={partition}"),
            list_sparsities(ROUND_BY_ROUND),
            choose("MAE", "attack accuracy", "attacks above 0.5"),
            is_attacked=True,
        )
        for name, partition in ENVIRONMENTS.items()
    },
    "fedsparsify_centralised": Table(
        "fedsparsify",
        "membership",
        "brain_t1",
        (*BRAIN_MLP, "simulator.sites=1"),
        list_sparsities(AT_THE_END),
        choose("MAE", "attack accuracy"),
        is_attacked=True,
    ),
    "lora_ablations": Table(
        "lora_a2",
        "lora_a2_banking77",
        "banking77/banking77.csv.gz",
        LORA_SETTINGS,
        list_lora(),
        choose("accuracy, %", "MB up"),
    ),
}
"""Tables by the name of their section."""


def run(table: Table, row: Row, data: Path, seed: int, folder: Path) -> Record:
    """Run a row with one seed in this process, and return its figures."""
    config = HERE / "membership.yaml" if table.config == "membership" else CONFIGS / f"{table.config}.yaml"
    where = write_texts(data / table.data) if table.paper == "lora_a2" else data / table.data
    began = time.process_time()
    result = fs.run(
        config,
        overrides=[*table.settings, *row.settings, f"seed={seed}", f"simulator.data.path={where}"],
        out=folder,
        observer=fs.Observer(),
    )
    record: Record = {"seconds": time.process_time() - began, "metrics": result.summary["final"]["metrics"]}
    record |= {"model": {name: result.summary["model"][name] for name in ("bytes", "parameters", "live")}}
    record |= result.summary["traffic"]
    if table.is_attacked:
        record |= attack(folder)
    return record


def attack(folder: Path) -> Record:
    """Return how well sites find each other's training examples, and the throughput of the model.

    One site alone is attacked by an attacker who holds a random half of its examples (the paper's centralised setting).
    """
    study = load_study(folder)
    task = study.assembly.task
    sites = {name: task.load(where, study.config.seed) for name, where in sorted(study.prepare_sites(folder).items())}
    parts = [part for own in sites.values() for part in (own.train, own.test)]
    members = np.concatenate([np.full(len(part), number % 2 == 0) for number, part in enumerate(parts)])
    names = np.repeat(list(sites), [len(own.train) + len(own.test) for own in sites.values()])
    # The centralised model is the one that the site has trained on after the pruning.
    own = sorted((folder / "site_models").glob("*")) if len(sites) == 1 else []
    model = fs.load_model(folder, next(iter(sites))) if own else load_trained_model(study)
    if len(sites) == 1:
        names = np.where(np.random.default_rng(study.config.seed).random(len(names)) < 0.5, "attacker", "others")
    features = compute_gradient_features(task, model, ConcatDataset(parts))
    pairs = list(attack_between_sites(features, members, names))
    inputs = next(task.iterate_batches(ConcatDataset(parts), 4))[0]
    cost = measure_cost(model, inputs)
    speeds = [way["examples_per_second"] for way in (cost["dense"], cost["sparse"]) if "examples_per_second" in way]
    figures = {"accuracy": fmean(pair.accuracy for pair in pairs), "above_half": sum(p.accuracy > 0.5 for p in pairs)}
    return {"attack": {**figures, "pairs": len(pairs)}, "examples_per_second": max(speeds), "cost": cost}


@cache
def write_texts(file: Path) -> Path:
    """Write the texts of 20 classes, 25 of each, and return the new file: the paper's data, smaller."""
    with gzip.open(file, "rt", encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    classes = {name: str(number) for number, name in enumerate(sorted({row["label"] for row in rows}, key=int)[:20])}
    kept: dict[str, list[dict[str, str]]] = {name: [] for name in classes}
    for row in rows:
        if row["label"] in kept and len(kept[row["label"]]) < 25:
            kept[row["label"]].append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(row for own in kept.values() for row in own)
    path = Path(tempfile.mkdtemp(prefix="flare-sparse-")) / "texts.csv"
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def read_records(out: Path, name: str) -> dict[str, list[Record]]:
    """Return the finished runs of a table by row."""
    return {
        row.label: [json.loads(file.read_text()) for file in sorted((out / name).glob(f"{file_name(row)}-*.json"))]
        for row in TABLES[name].rows
    }


def file_name(row: Row) -> str:
    return row.label.replace(" ", "_").replace("%", "").replace(",", "")


def format_table(name: str, records: Mapping[str, Sequence[Record]]) -> str:
    """Return Markdown: of each column the paper's figure, where it prints one, and ours with a standard deviation."""
    table = TABLES[name]
    printed = [column for column in table.columns if any(column in row.paper for row in table.rows)]
    heads = [head for column in table.columns for head in ([f"{column}: paper"] * (column in printed) + [column])]
    counts = sorted({len(own) for own in records.values() if own})
    spread = "; after ± the standard deviation" if counts[-1] > 1 else ""
    lines = [
        f"Seeds: {' to '.join(map(str, {counts[0]: 0, counts[-1]: 0}))}{spread}.",
        "",
        f"| | {' | '.join(heads)} |",
        "| --- " * (len(heads) + 1) + "|",
    ]
    for row in table.rows:
        cells = []
        for column, read in table.columns.items():
            cells += [row.paper.get(column, "")] if column in printed else []
            cells.append(format_spread([read(record) for record in records[row.label]], DIGITS.get(column, 2)))
        lines.append(f"| {row.label} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def update_docs(out: Path) -> None:
    """Write the tables of the pages and their figures from the finished runs."""
    for name, table in TABLES.items():
        records = read_records(out, name)
        if any(records.values()):
            write_section(f"../papers/{table.paper}", name, format_table(name, records))
    plt.style.use("flare_sparse.results.report.plots")
    for paper, panels in FIGURES.items():
        names = {name for panel in panels for points in panel.lines.values() for name, *_ in points}
        if not any(own for name in names for own in read_records(out, name).values()):
            continue
        figure, axes = plt.subplots(
            1, len(panels), figsize=(4.6 * len(panels), 3.6), layout="constrained", squeeze=False
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            draw(axis, panel, out)
        figure.savefig(IMAGES / f"paper_{paper}.png")
        plt.close(figure)


@dataclass(frozen=True)
class Panel:
    """One panel of a figure.

    Attributes:
        title, x: what it says and the name of its axis.
        column: the figure of a run that it shows.
        lines: points by name of the line: table, label of the row, position.
        ticks: labels of the positions 0, 1, ...; none: numbers.
    """

    title: str
    x: str
    column: str
    lines: Mapping[str, Sequence[tuple[str, str, float]]]
    ticks: Sequence[str] = ()


def draw(axis: Any, panel: Panel, out: Path) -> None:
    """Draw each line of a panel, ours solid with a standard deviation, and the paper's dashed in the same colour."""
    for number, (label, points) in enumerate(panel.lines.items()):
        ours, printed = [], []
        for name, row_label, x in points:
            values = [COLUMNS[panel.column](record) for record in read_records(out, name)[row_label]]
            if values:
                ours.append((x, fmean(values), stdev(values) if len(values) > 1 else 0.0))
            paper = next(row for row in TABLES[name].rows if row.label == row_label).paper.get(panel.column, "")
            if paper.replace(".", "").isdigit():
                printed.append((x, float(paper)))
        color = f"C{number}"
        if ours:
            axis.errorbar(*zip(*ours, strict=True), fmt="o-", color=color, label=label, capsize=2)
        if printed:
            axis.plot(*zip(*printed, strict=True), "--", color=color, alpha=0.6)
    axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.column)
    if panel.ticks:
        axis.set_xticks(range(len(panel.ticks)), panel.ticks)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")


SHARES = ("dense", *(f"{share:.0%}" for share in SPARSITIES))
BY_SPARSITY = {label: number for number, label in enumerate(SHARES)}
BRAIN_LINES = {
    title: [(f"fedsparsify_{name}", label, float(x)) for label, x in BY_SPARSITY.items()]
    for title, name in (
        ("uniform, IID", "uniform_iid"),
        ("uniform, by age", "uniform_age"),
        ("skewed, IID", "skewed_iid"),
        ("skewed, by age", "skewed_age"),
        ("one site", "centralised"),
    )
}
FIGURES = {
    "fedsparsify": (
        Panel("Figures 3a and 4: error", "pruned", "MAE", BRAIN_LINES, SHARES),
        Panel("Figures 3b and 5: attacks", "pruned", "attack accuracy", BRAIN_LINES, SHARES),
    ),
    "scbf": (
        Panel(
            "Figure 5: update rate",
            "update rate, %",
            "AUC-ROC",
            {"SCBFwP": [("scbf_rates", f"{10 * n} %", 10.0 * n) for n in range(1, 11)]},
        ),
        Panel(
            "Figure 7: units pruned in all",
            "units pruned, %",
            "AUC-ROC",
            {
                "10 % a pruning": [
                    ("scbf_prunings", f"10 % a pruning, {100 * (1 - 0.9**n):.0f} % in all", 100 * (1 - 0.9**n))
                    for n in range(1, 7)
                ]
            },
        ),
    ),
    "neurosfl": (
        Panel(
            "Figure 2: sparsity",
            "sparsity, %",
            "accuracy, %",
            {
                label: [
                    ("neurosfl_sparsity", f"{label} {percent} %", float(percent)) for percent in (0, 50, 80, 90, 95)
                ]
                for label in ("NeuroSFL", "DisPFL", "IndividualSNIP", "global random mask")
            },
        ),
        Panel(
            "Figures 4 to 6: sites with Dir(0.3)",
            "sparsity, %",
            "F1",
            {
                f"{sites} sites": [("neurosfl_clients", f"{sites} sites, {p} %", float(p)) for p in (0, 50, 80, 90, 95)]
                for sites in (10, 20, 30)
            },
        ),
    ),
    "lora_a2": (
        Panel(
            "Rank",
            "rank of 16",
            "accuracy, %",
            {"LoRA-A2": [("lora_ablations", f"rank {rank}", float(rank)) for rank in (1, 2, 4, 8)]},
        ),
    ),
}
"""Panels of the figure of each page."""


def format_spread(values: Sequence[float], digits: int) -> str:
    if not values:
        return "not run"
    mean = f"{fmean(values):,.{digits}f}"
    spread = stdev(values) if len(values) > 1 else 0.0
    return mean if math.isclose(spread, 0, abs_tol=10**-digits / 2) else f"{mean} ± {spread:,.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the cohorts")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/papers"))
    parser.add_argument("--docs", action="store_true", help="write tables and figures of docs/papers from --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plan = [(name, row, seed) for name in arguments.only for seed in arguments.seeds for row in TABLES[name].rows]
    for name, row, seed in plan:
        file = arguments.out / name / f"{file_name(row)}-{seed}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        with claim(file) as is_claimed:
            if not is_claimed:
                continue
            folder = file.with_suffix(".run")
            shutil.rmtree(folder, ignore_errors=True)
            record = run(TABLES[name], row, arguments.data.resolve(), seed, folder)
            write_json(file, record)
            shutil.rmtree(folder)
            print(name, row.label, seed, record["metrics"], f"{record['seconds']:.0f} s", flush=True)
    for name in arguments.only:
        print(f"\n## {name}\n\n{format_table(name, read_records(arguments.out, name))}")
    if arguments.docs:
        update_docs(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
