"""Tables with one set of defaults: a federated network against linear models of each site and of all sites pooled.

    pip install lifelines scikit-survival     # for the survival cohorts; scikit-survival is under the GPL
    python benchmarks/experiments/tables.py ../shared/data [--only lung] [--seeds 1 2 3] [--out runs/tables]
    python benchmarks/experiments/tables.py --report [--picture FILE] [--out runs/tables]

Seven cohorts, five folds that test every subject once per seed. Network, training and scaling are the same for all
cohorts; only the scale of a numeric target is the cohort's. Common models take one step a round (``STEP``), which was
chosen by validation error with seed 11, and personalised ones start from them; those of a number train for two epochs
(``EPOCHS``), with mean and spread of the number of each site. A finished run is not repeated. ``--report`` writes
OUT/tables.csv, and ``--picture`` draws the differences in it.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from runs import claim

from flare_sparse.api.report import read_with_predictions
from flare_sparse.api.start import run
from flare_sparse.core.observer import SILENT
from flare_sparse.results.report.figures import render_png
from flare_sparse.results.runs.baselines import NAMES
from flare_sparse.results.runs.comparison import ExampleTests
from flare_sparse.results.runs.predictions import RUN

FOLDS = 5
STEP: dict[str, Any] = {
    "rounds": 60,
    "evaluate_every": 30,
    "model_average": {"kind": "ema"},
    # One step a round on all examples of a site: their mean is the gradient of all sites.
    "training": {"optimizer": "sgd", "lr": 0.1, "epochs": 1, "batch_size": 4096, "weight_decay": 0.3},
    "server": {"optimizer": "adam", "lr": 0.005},
}
EPOCHS: dict[str, Any] = {
    "rounds": 30,
    "model_average": {"kind": "ema"},
    "training": {
        "epochs": 2, "batch_size": 32, "optimizer": "adamw", "lr": 3e-3, "weight_decay": 1,
        "schedule": {"kind": "cosine"},
    },
}  # fmt: skip
FINETUNE = {"epochs": 10, "lr": 0.01, "proximal": [0.1, 1, 10]}
PERSONAL_NUMBER = {"name": "fedavg", **EPOCHS, "personal": "site", "finetune": {**FINETUNE, "lr": 1e-3}}
"""Personalised FedAvg where mean and spread of the target, a number, stay at the site."""
ARMS: dict[str, dict[str, Any]] = {
    "FedAvg": {"name": "fedavg", **STEP},
    "NeuroSFL 90 %": {"name": "neurosfl", **STEP, "sparsity": 0.9, "scores": "weighted_snip", "saliency_batches": 1},
    # From the start, magnitudes are those of the initial weights.
    "FedSparsify 90 %": {"name": "fedsparsify", **STEP, "sparsity": 0.9, "first_round": 30},
    "FedAvg, personalised": {"name": "fedavg_ft", **STEP, "finetune": FINETUNE},
}
DRAWN = {"kind": "iid", "sizes": "skewed"}
MOST = 2500
"""Most subjects of a survival cohort: the interval of a C-index compares all pairs."""


@dataclass(frozen=True)
class Table:
    """A cohort.

    Attributes:
        task: settings of the task beside the common ones.
        partition: its sites.
        sites: number of sites, where they are drawn.
        file: the table below the data folder; empty: made by ``write_table``.
    """

    task: dict[str, Any]
    partition: dict[str, Any]
    sites: int | None = None
    file: str = ""


def _describe_age(file: str, center: float, spread: float) -> Table:
    task = {"kind": "regression", "target": "age", "target_scale": [center, spread], "features": ["destrieux", "sex"]}
    return Table({**task, "id": "subject"}, {"kind": "natural", "column": "site"}, None, f"brain_morphometry/{file}")


def _describe_survival(sites: int | None, partition: dict[str, Any], *others: str) -> Table:
    features = {"all_but": ["time", "event", *others]}
    return Table({"kind": "survival", "target": "time", "event": "event", "features": features}, partition, sites)


TABLES = {
    "lung": _describe_survival(4, DRAWN),
    "whas500": _describe_survival(4, DRAWN),
    "openneuro": _describe_age("destrieux_openneuro.csv.gz", 26, 13),
    "eicu": Table(
        {
            "kind": "binary",
            "target": "died",
            "group": "patient",
            "features": {"all_but": ["died", "patient", "region"]},
        },
        {"kind": "natural", "column": "region"},
    ),
    "flchain": _describe_survival(None, {"kind": "natural", "column": "year"}, "year"),
    "abide1": _describe_age("destrieux_abide1.csv.gz", 17, 8),
    "fcon1000": _describe_age("destrieux_fcon1000.csv.gz", 28, 13),
}


def write_table(name: str, data: Path, file: Path) -> None:
    """Write a cohort as CSV."""
    if name == "eicu":
        source = np.load(data / "eicu_demo" / "mortality.npz")
        columns = {f"drug_{code}": source["meds_24h"][:, i] for i, code in enumerate(source["med_hicl"])}
        facts = {key: source[key] for key in ("age", "male", "patient", "region")}
        table = pd.DataFrame({**facts, **columns, "died": source["died_in_hospital"]})
        table = table[(table["died"] >= 0) & source["has_medications"]]
        table["region"] = table["region"].replace("", "unknown")
    elif name == "lung":
        from lifelines.datasets import load_lung

        table = load_lung().drop(columns="inst").rename(columns={"status": "event"})
    else:
        from sksurv import datasets

        rows, outcome = getattr(datasets, f"load_{name}")()
        table = rows.apply(pd.to_numeric, errors="coerce") if name == "whas500" else rows.drop(columns="chapter")
        event, observed = outcome.dtype.names
        table = table.assign(time=outcome[observed], event=outcome[event].astype(int))
        if name == "flchain":
            sex = (table["sex"] == "M").astype(int)
            table = table.assign(sex=sex, mgus=(table["mgus"] == "yes").astype(int)).rename(
                columns={"sample.yr": "year"}
            )
            table = table.sample(MOST, random_state=0)
    table.to_csv(file, index=False)


def write_configuration(name: str, data: Path, folder: Path) -> Path:
    """Write the YAML file of a cohort, without its method, and return it."""
    table, file = TABLES[name], folder / f"{name}.csv"
    if not table.file and not file.exists():
        write_table(name, data, file)
    network = {"model": {"name": "resnet_mlp"}, "scaling": "federated", "missing": "impute", "clip": 3}
    path = data / table.file if table.file else file
    content = {
        "name": name,
        "method": {"name": "fedavg"},
        "task": {"name": "table", **network, **table.task},
        "simulator": {"data": {"path": str(path.resolve()), "partition": table.partition}},
        "federation": {"threads": 1},
    }
    if table.sites:
        content["simulator"]["sites"] = table.sites  # type: ignore[index]
    written = folder / f"{name}.yaml"
    written.write_text(yaml.safe_dump(content), encoding="utf-8")
    return written


def name_folder(arm: str) -> str:
    """Return the beginning of the names of an arm's run folders."""
    return re.sub("[^a-z0-9]+", "_", arm.lower()).strip("_")


def write_report(folder: Path, names: Iterable[str]) -> None:
    """Write a row per cohort and method: the metric, and its paired differences from the linear models and FedAvg."""
    rows = []
    for name in names:
        table = TABLES[name]
        runs = sorted(path.parent for path in (folder / name).glob("*/summary.json"))
        if not runs:
            continue
        results, _ = read_with_predictions(runs, baselines=True, observer=SILENT)
        arms = {}
        for arm in ARMS:
            own = [result for result in results if result.path.name.startswith(f"{name_folder(arm)}-")]
            if own and (tests := ExampleTests.collect(own)):
                arms[arm] = tests
        linear = NAMES[table.task["kind"]]
        for arm, tests in arms.items():
            row = {"cohort": name, "method": arm, "runs": str(len(tests.runs))}
            # Inputs of the personalised runs are scaled by site: the linear models are those of the common inputs.
            for title, other in (("local", f"{linear}_local"), ("pooled", f"{linear}_pooled"), ("FedAvg", RUN)):
                differences, _ = tests.compare(arms["FedAvg"], other)
                metric, found = list(differences.items())[-1]
                row |= {"metric": metric, "value": f"{found['first']:.3f}"}
                if (arm, title) != ("FedAvg", "FedAvg"):
                    interval = f"{found['low']:+.3f} to {found['high']:+.3f}"
                    row[f"minus {title}"] = f"{found['value']:+.3f} ({interval}) {found['verdict']}"
            rows.append(row)
    with (folder / "tables.csv").open("w", newline="", encoding="utf-8") as stream:
        columns = ("cohort", "method", "runs", "metric", "value", "minus local", "minus pooled", "minus FedAvg")
        writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw_differences(rows: list[dict[str, str]]) -> Figure:
    """Draw the differences from the pooled linear model with their intervals; to the right of 0, a method is ahead."""
    rows = [row for row in rows if row["minus pooled"]]
    panels = [[row for row in rows if (row["metric"] == "mae") is is_error] for is_error in (True, False)]
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), layout="constrained")
    for axis, part, unit in zip(axes, panels, ("error, years less", "AUC or C-index more"), strict=True):
        cohorts = list(dict.fromkeys(row["cohort"] for row in part))
        for number, arm in enumerate(ARMS):
            for row in (row for row in part if row["method"] == arm):
                found = re.match(r"(\S+) \((\S+) to (\S+)\)", row["minus pooled"])
                assert found, "write_report writes all three"
                value, *ends = (float(text) * (-1 if row["metric"] == "mae" else 1) for text in found.groups())
                height = cohorts.index(row["cohort"]) + (number - (len(ARMS) - 1) / 2) * 0.14
                axis.plot(sorted(ends), [height] * 2, color=f"C{number}")
                label = arm if row["cohort"] == cohorts[0] else None
                axis.plot(value, height, "o", color=f"C{number}", markersize=4, label=label)
        axis.axvline(0, color="0.4", linewidth=0.8)
        axis.set_yticks(range(len(cohorts)), cohorts)
        axis.invert_yaxis()
        axis.set_xlabel(f"{unit} than pooled")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(ARMS))
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder with brain_morphometry/ and eicu_demo/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--out", type=Path, default=Path("runs/tables"))
    parser.add_argument("--report", action="store_true", help="write OUT/tables.csv from the finished runs")
    parser.add_argument("--picture", type=Path, help="PNG of the differences in OUT/tables.csv")
    arguments = parser.parse_args()
    if arguments.report:
        write_report(arguments.out, arguments.only)
    if arguments.picture:
        with (arguments.out / "tables.csv").open(newline="", encoding="utf-8") as stream:
            arguments.picture.write_bytes(render_png(draw_differences, list(csv.DictReader(stream))))
    if arguments.report or arguments.picture:
        return 0
    for seed, name in product(arguments.seeds, arguments.only):
        (arguments.out / name).mkdir(parents=True, exist_ok=True)
        configuration = write_configuration(name, arguments.data, arguments.out)
        for fold, arm in product(range(1, FOLDS + 1), arguments.arms):
            method = ARMS[arm]
            folder, start = arguments.out / name / f"{name_folder(arm)}-{seed}-{fold}", time.monotonic()
            # Another process may share the work.
            with claim(folder) as is_claimed:
                if not is_claimed:
                    continue
                split = {"folds": FOLDS, "fold": fold, "validation": 0.1}
                settings: dict[str, Any] = {"seed": seed, "method": method, "task.split": split}
                if "finetune" in method and TABLES[name].task["kind"] == "regression":
                    settings |= {"method": PERSONAL_NUMBER, "task.scaling": "site", "task.target_scaling": "site"}
                finished = run(configuration, overrides=settings, out=folder, observer=SILENT)
            print(
                f"{name} {arm} {seed} {fold}: {finished.summary['final']['metrics']}",
                f"{time.monotonic() - start:.0f} s",
            )
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
