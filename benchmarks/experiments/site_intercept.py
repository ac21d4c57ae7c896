"""A site's own intercept (``method.personal: intercept``) where sites have other base rates: deaths of in-patients.

    python benchmarks/experiments/site_intercept.py ../shared/data [--only eicu] [--folds 1 2 3] [--out FOLDER]
    python benchmarks/experiments/site_intercept.py --report [--out FOLDER]

FedAvg of a small network: one common model, an intercept of each site, its own last layer, or no exchange at all.
The settings are those of FedAvg alone and were chosen for no arm. A subject's score is the logarithmic loss of its own
site's model; each fold tests a fifth of the subjects of each site. Finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from runs import compare_scores, predict_at_site, write_once

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import prepare_site_data
from flare_sparse.results.runs.bootstrap import AUC, compare_predictors
from flare_sparse.results.runs.local import run_assembly

DIABETES = {
    "target": "expired",
    "features": ["meds_{0..22}", "numeric_{1..7}"],
    "rows": {"first_encounter": 1, "hospice": 0},
    "model": {"name": "mlp", "hidden": [32]},
}
COHORTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "diabetes_age": ("Diabetes, 10 age bands", "diabetes130/mortality.npz", DIABETES, {"column": "age_band"}),
    "diabetes_source": (
        "Diabetes, sources of admission", "diabetes130/mortality.npz", DIABETES,
        {"column": "cat_admission_source_id"},
    ),
    "eicu": (
        "eICU, 5 regions", "eicu_demo/mortality.npz",
        {
            "target": "died_in_hospital", "features": ["meds_24h_{0..419}"], "id": "stay", "group": "patient",
            "rows": {"has_medications": 1}, "skip_bad_subjects": True, "missing_codes": {"died_in_hospital": -1},
            "model": {"name": "mlp", "hidden": [64, 32]},
        },
        {"column": "region", "missing": "unknown"},
    ),
}  # fmt: skip
"""Title, file, task and partition of each cohort."""
COMMON = "common model"
ARMS: dict[str, dict[str, Any]] = {
    COMMON: {},
    "own intercept": {"personal": "intercept"},
    "own last layer": {"personal": "head"},
    "no exchange": {"name": "local_only"},
}


def run(name: str, arm: str, fold: int, data: Path, out: Path) -> dict[str, Any]:
    """Return probability, label and site of every test subject."""
    _, path, task, partition = COHORTS[name]
    training = {"epochs": 1, "batch_size": 64, "optimizer": "adam", "lr": 1e-3}
    content = {
        "name": "intercept", "seed": 1,
        "method": {"name": "fedavg", "rounds": 30, "training": training, "evaluate_every": 1000, **ARMS[arm]},
        "task": {"name": "table", "kind": "binary", "scaling": "none", **task, "split": {"folds": 5, "fold": fold}},
        "simulator": {"data": {"path": str((data / path).resolve()), "partition": {"kind": "natural", **partition}}},
        "federation": {"threads": 1},
    }  # fmt: skip
    file = out / f"{name}.{arm}.{fold}.yaml".replace(" ", "_")
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    config = load_config(file)
    assembly = assemble(config)
    sites = {site: open_site(assembly, own) for site, own in prepare_site_data(config, assembly.task, Path()).items()}
    run_assembly(config, assembly, sites)
    row: dict[str, Any] = {"probability": [], "label": [], "site": []}
    for site, own in sites.items():
        if not own.trainer.num_test_examples:
            continue
        predictions, targets = predict_at_site(assembly.task, own, own.trainer.examples.test)
        row["probability"] += predictions[:, -1].tolist()
        row["label"] += targets.tolist()
        row["site"] += [site] * len(targets)
    return row


def report(folder: Path) -> str:
    """Return the table of logarithmic losses and areas, each minus the common model's."""
    lines = ["| cohort | model | logarithmic loss | minus common [95 %] | AUC over all sites | minus common [95 %] |"]
    lines.append("| --- " * 6 + "|")
    for (name, cohort), arm in product(COHORTS.items(), ARMS):
        folds = [fold for fold in range(1, 6) if (folder / f"{name}_{arm}_{fold}.json".replace(" ", "_")).exists()]
        if not folds:
            continue
        read = [
            [json.loads((folder / f"{name}_{a}_{fold}.json".replace(" ", "_")).read_text()) for fold in folds]
            for a in (arm, COMMON)
        ]
        own, common = (
            {key: np.concatenate([row[key] for row in rows]) for key in ("probability", "label", "site")}
            for rows in read
        )
        losses = [
            -np.log(np.clip(np.where(r["label"] == 1, r["probability"], 1 - r["probability"]), 1e-6, 1))
            for r in (own, common)
        ]
        loss = compare_scores(losses[0], losses[1], own["site"], is_lower_better=True)
        area = compare_predictors(
            AUC, own["probability"], common["probability"], own["label"][:, None], np.zeros(len(own["label"])),
            np.arange(len(own["label"])), resamples=1000,
        )  # fmt: skip
        assert area is not None, "both classes occur"
        cells = [f"{loss.first:.4f}", f"{loss.value:+.4f} [{loss.low:+.4f}, {loss.high:+.4f}]"]
        cells += [f"{area.first:.3f}", f"{area.value:+.3f} [{area.low:+.3f}, {area.high:+.3f}]"]
        if arm == COMMON:
            cells[1] = cells[3] = ""
        lines.append(f"| {cohort[0]} | {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", help="folder with the cohorts")
    parser.add_argument("--only", choices=COHORTS, nargs="+", default=list(COHORTS))
    parser.add_argument("--folds", type=int, choices=range(1, 6), nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs/site_intercept"))
    parser.add_argument("--report", action="store_true", help="print the table of the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for fold, name, arm in product(arguments.folds, arguments.only, ARMS) if arguments.data else ():
        file = arguments.out / f"{name}_{arm}_{fold}.json".replace(" ", "_")
        if write_once(file, partial(run, name, arm, fold, arguments.data, arguments.out)):
            print(name, arm, fold, flush=True)
    if arguments.report:
        print(report(arguments.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
