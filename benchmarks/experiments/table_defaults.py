"""Settings for tables that were chosen on other tables: a federated network against the pooled linear model.

    python benchmarks/experiments/table_defaults.py ../shared/data [--only openneuro] [--folds 1 2 3] [--out FOLDER]
    python benchmarks/experiments/table_defaults.py --report [--out FOLDER]

Six tables, FedAvg with one step a round. Candidates are compared by the error on the validation subjects of fold 1, as
a ratio to that of the first candidate; each table takes the candidate with the smallest mean ratio over the tables of
other subjects. Its test subjects of all folds are then compared with linear models, whose penalty the validation
subjects of the table itself choose. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from cohorts import tabulate
from runs import compare_scores, write_once

from flare_sparse.config.assemble import Assembly, assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.results.runs.baselines import NAMES, fit_baselines
from flare_sparse.results.runs.bootstrap import AUC, compare_predictors
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.training import Site

BASELINES = "linear models"


@dataclass(frozen=True)
class Table:
    """A table: file below the data folder, task, column of the sites, subjects and columns; empty file: invented."""

    file: str
    task: dict[str, Any]
    column: str
    rows: int
    inputs: int


def _describe_age(file: str, atlas: str, center: float, spread: float, rows: int, inputs: int) -> Table:
    task = {"kind": "regression", "target": "age", "target_scale": [center, spread], "id": "subject"}
    return Table(f"brain_morphometry/{file}", task | {"features": [atlas, "sex"]}, "site", rows, inputs)


TABLES = {
    "births": Table(
        "",
        {"kind": "regression", "target": "grams", "target_scale": [3100, 650], "features": ["weeks", "age", "smoker"]},
        "site",
        800,
        3,
    ),
    "openneuro": _describe_age("destrieux_openneuro.csv.gz", "destrieux", 26, 13, 518, 381),
    "abide_desikan": _describe_age("desikan_abide1.csv.gz", "desikan", 17, 8, 1035, 140),
    "eicu": Table(
        "eicu_demo/mortality.npz",
        {
            "kind": "binary", "target": "died_in_hospital", "features": ["age", "male", "apache", "meds_24h_{0..419}"],
            "id": "stay", "group": "patient", "rows": {"has_medications": 1}, "skip_bad_subjects": True,
            "missing_codes": {"died_in_hospital": -1, "apache": -1},
        },
        "region",
        1834,
        423,
    ),
    "abide1": _describe_age("destrieux_abide1.csv.gz", "destrieux", 17, 8, 1035, 381),
    "fcon1000": _describe_age("destrieux_fcon1000.csv.gz", "destrieux", 28, 13, 1078, 381),
}  # fmt: skip
RELATIVES = {"abide1": "abide_desikan", "abide_desikan": "abide1"}
"""Tables of the same subjects, which are left out together."""


@dataclass(frozen=True)
class Candidate:
    """Settings: the weight decay, or its factor of inputs through training rows; of what init wrote, none."""

    rounds: int
    lr: float
    decay: float
    is_relative: bool
    clip: float | None

    def build_method(self, table: Table) -> dict[str, Any]:
        """Return the method section."""
        if not self.lr:
            return {"name": "fedavg", "rounds": self.rounds, "training": {**STEP, "batch_size": 64}}
        # 65 % of the rows train.
        decay = self.decay * table.inputs / (0.65 * table.rows) if self.is_relative else self.decay
        method = {"name": "fedavg", "rounds": self.rounds, "evaluate_every": 50, "model_average": {"kind": "ema"}}
        server = {"optimizer": "adam", "lr": self.lr}
        return {**method, "training": {**STEP, "batch_size": 4096, "weight_decay": decay}, "server": server}


STEP = {"optimizer": "sgd", "lr": 0.1, "epochs": 1}
CANDIDATES = {
    "60 rounds, decay 0.3": Candidate(60, 0.005, 0.3, False, 3),
    "100 rounds, decay 0.3": Candidate(100, 0.02, 0.3, False, 5),
    "decay 0.3 inputs / rows": Candidate(100, 0.02, 0.3, True, 5),
    "decay 1 inputs / rows": Candidate(100, 0.02, 1.0, True, 5),
    "20 rounds of minibatches": Candidate(20, 0, 0, False, None),
}
"""As table-task.md had them, steps of 0.02 instead of 0.005, weight decay by the table's shape, as init wrote them."""


def write_births(file: Path) -> None:
    """Write a table with one strong predictor: birth weight by weeks of pregnancy."""
    random.seed(0)
    lines = ["site,weeks,age,smoker,grams"]
    for number in range(800):
        weeks = min(42, random.gauss(39.2, 1.6)) if random.random() > 0.1 else random.uniform(24, 37)
        age, smoker = random.gauss(27, 5), int(random.random() < 0.2)
        grams = 150 * (weeks - 39) + 3300 - 150 * smoker + random.gauss(0, 350)
        lines.append(f"s{number % 4},{weeks:.1f},{age:.0f},{smoker},{grams:.0f}")
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def build_config(name: str, candidate: Candidate, fold: int, data: Path, out: Path) -> RunConfig:
    """Return the configuration of a run."""
    table, file = TABLES[name], out / f"{name}.{fold}.yaml"
    path = data / table.file if table.file else out / "births.csv"
    if not path.exists():
        write_births(path)
    task = {"name": "table", **table.task, "scaling": "federated", "missing": "impute", "clip": candidate.clip}
    task |= {"model": {"name": "resnet_mlp"}, "split": {"folds": 5, "fold": fold, "validation": 0.15}}
    partition = {"kind": "natural", "column": table.column, **({"missing": "unknown"} if name == "eicu" else {})}
    content = {
        "name": "table", "seed": 1, "method": candidate.build_method(table), "task": task,
        "simulator": {"data": {"path": str(path.resolve()), "partition": partition}}, "federation": {"threads": 1},
    }  # fmt: skip
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return load_config(file)


def run(name: str, label: str, fold: int, data: Path, out: Path) -> dict[str, Any]:
    """Return predictions and targets of a run, or of the linear models."""
    candidate = CANDIDATES.get(label, next(iter(CANDIDATES.values())))
    config = build_config(name, candidate, fold, data, out)
    assembly = assemble(config)
    sites = {site: open_site(assembly, own) for site, own in prepare_site_data(config, assembly.task, Path()).items()}
    if label == BASELINES:
        rows = {site: tabulate(own) for site, own in sites.items()}
        fitted = fit_baselines(TABLES[name].task["kind"], rows)
        targets = np.concatenate([own.test.y[:, 0] for own in rows.values() if len(own.test.y)])
        return {"y": targets.tolist(), **{key: values[:, -1].tolist() for key, values in fitted.items()}}
    outcome, ledger = run_assembly(config, assembly, sites)
    predictions = {part: predict(assembly, sites, outcome.weights, part) for part in ("test", "validation")}
    return {"bytes": sum(line.payload_bytes for line in ledger.lines), **predictions}


def predict(assembly: Assembly, sites: dict[str, Site], weights: torch.Tensor, part: str) -> list[list[float]]:
    """Return predictions and targets of the examples of all sites."""
    model, pairs = assembly.build_network(weights), []
    for site in sites.values():
        if (examples := getattr(site.trainer.examples, part)) is not None and len(examples):
            predictions, targets = assembly.task.measure_all(model, examples)
            pairs.append((predictions[:, -1], targets.reshape(len(targets), -1)[:, 0]))
    return [torch.cat(columns).tolist() for columns in zip(*pairs, strict=True)]


def measure(name: str, row: dict[str, Any]) -> float:
    """Return the error on validation subjects: mean absolute error, or 1 - AUC."""
    predictions, targets = map(np.array, row["validation"])
    if TABLES[name].task["kind"] == "regression":
        return float(np.abs(predictions - targets).mean())
    positive, negative = predictions[targets == 1][:, None], predictions[targets == 0]
    return 1 - float(((positive > negative) + (positive == negative) / 2).mean())


def report(folder: Path) -> str:
    """Return the tables of the choice and of the test subjects."""
    rows = {tuple(file.stem.rsplit("_", 1)): json.loads(file.read_text()) for file in folder.glob("*_[1-5].json")}
    errors = {
        (name, label): measure(name, rows[f"{name}_{label}".replace(" ", "_").replace("/", "by"), "1"])
        for name, label in product(TABLES, CANDIDATES)
    }
    first = next(iter(CANDIDATES))
    lines = ["| validation | " + " | ".join(CANDIDATES) + " | chosen by the others |"]
    lines.append("| --- " * (len(CANDIDATES) + 2) + "|")
    chosen = {}
    for name in TABLES:
        others = [other for other in TABLES if other not in (name, RELATIVES.get(name))]
        ratios = {c: np.mean([errors[other, c] / errors[other, first] for other in others]) for c in CANDIDATES}
        chosen[name] = min(ratios, key=lambda label: ratios[label])
        lines.append(f"| {name} | " + " | ".join(f"{errors[name, c]:.4g}" for c in CANDIDATES) + f" | {chosen[name]} |")
    lines += ["", "| test | folds | error | pooled linear | minus pooled | minus each site's own |", "| --- " * 6 + "|"]
    for name, label in chosen.items():
        stem = f"{name}_{label}".replace(" ", "_").replace("/", "by")
        folds = sorted(fold for key, fold in rows if key == stem)
        own, base = ([rows[key, fold] for fold in folds] for key in (stem, f"{name}_{BASELINES.replace(' ', '_')}"))
        targets, predicted = (np.concatenate([row["test"][which] for row in own]) for which in (1, 0))
        cells: list[str] = []
        for which in ("local", "pooled"):
            key = f"{NAMES[TABLES[name].task['kind']]}_{which}"
            other, sites = np.concatenate([row[key] for row in base]), np.zeros(len(targets))
            if TABLES[name].task["kind"] == "regression":
                scores = (np.abs(values - targets) for values in (predicted, other))
                found = compare_scores(*scores, sites, is_lower_better=True)
            else:
                subjects = np.arange(len(targets))
                found = compare_predictors(AUC, predicted, other, targets[:, None], sites, subjects, resamples=2000)  # type: ignore[assignment]
            cells.insert(0, f"{found.value:+.3g} [{found.low:+.3g}, {found.high:+.3g}] {found.verdict}")
        lines.append(f"| {name} | {len(folds)} | {found.first:.4g} | {found.second:.4g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder with brain_morphometry/ and eicu_demo/")
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--candidates", choices=CANDIDATES, nargs="+", default=list(CANDIDATES))
    parser.add_argument("--folds", type=int, choices=range(1, 6), nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/table_defaults"))
    parser.add_argument("--report", action="store_true", help="print the tables of the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    plan = product(arguments.folds, arguments.only, [BASELINES, *arguments.candidates]) if arguments.data else ()
    for fold, name, label in plan:
        file = arguments.out / f"{name}_{label}_{fold}.json".replace(" ", "_").replace("/", "by")
        if write_once(file, partial(run, name, label, fold, arguments.data, arguments.out)):
            print(name, label, fold, flush=True)
    if arguments.report:
        print(report(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
