"""Age at real scan sites from FreeSurfer tables: personalised federated models against linear ones and local training.

    python benchmarks/experiments/cohorts.py ../shared/data [--only fcon1000] [--seeds 1 2 3] [--out runs/cohorts]

Three cohorts: 1000 Functional Connectomes (23 sites), OpenNeuro (6) and ABIDE I (20). Five folds test every subject
of every site once per seed; validation subjects, a tenth of each site, choose penalties, pulls and settings.
``--left-out`` trains without one site, which then adapts the model with its first 20 subjects. Each run is one
process without FLARE, uses the real wire and ends with the same bits as a FLARE job. Each run writes one JSON file:
finished runs are not repeated and several processes may share the work. ``--docs`` writes docs/results/age.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cohorts_report import update_docs
from runs import CONFIGS, claim
from torch.utils.data import ConcatDataset

from flare_sparse.config.assemble import Assembly, assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.core.mask import Mask
from flare_sparse.core.seeds import limit_threads
from flare_sparse.inputs.scaling import build_statistics_mask
from flare_sparse.results.runs.baselines import SiteRows, fit_baselines, label_rows
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.tasks.task import Examples, SiteData
from flare_sparse.training import LocalTask, Site, build_site

FILES = {
    "fcon1000": "destrieux_fcon1000.csv.gz",
    "openneuro": "destrieux_openneuro.csv.gz",
    "abide1": "destrieux_abide1.csv.gz",
}
FOLDS = 5
FIRST = 20
"""Subjects of a left-out site that adapt the model; the others test it."""
PLAIN = ("task.scaling=federated", "task.target_scaling=none")
"""One model for all sites: inputs scaled by statistics of all sites, one scale of the target."""
TRAINING = "epochs: 2, optimizer: adamw, schedule: {kind: cosine}"


@dataclass(frozen=True)
class Arm:
    """One line of a table: a published configuration and settings that replace its own."""

    config: str
    overrides: tuple[str, ...] = ()
    is_pooled: bool = False


def _set_method(text: str, training: str) -> str:
    return f"method={{{text}, training: {{{TRAINING}, {training}}}}}"


LOCAL = _set_method("name: local_only, rounds: 15, personal: site", "batch_size: 8, lr: 3e-3, weight_decay: 3")
SHARED = _set_method(
    "name: fedavg, rounds: 30, model_average: {kind: ema}", "batch_size: 64, lr: 1e-3, weight_decay: 3"
)
ARMS = {
    "local network": Arm("fedavg_scanner_age", (LOCAL,)),
    "pooled network": Arm("fedavg_scanner_age", (*PLAIN, SHARED), is_pooled=True),
    "FedAvg": Arm("fedavg_scanner_age", (*PLAIN, SHARED)),
    "FedAvg, personalised": Arm("fedavg_scanner_age"),
    "FedAvg, personalised, ComBat": Arm("fedavg_scanner_age", ("task.scaling=combat", "task.covariates=[sex]")),
    "NeuroSFL 90 %, personalised": Arm("neurosfl_scanner_age"),
    "FedSparsify 90 %, personalised": Arm("fedsparsify_scanner_age"),
}
BASELINES = "baselines"
ADAPTED = ("FedAvg, personalised", "NeuroSFL 90 %, personalised", "FedSparsify 90 %, personalised")


def load_arm(arm: Arm, cohort: str, data: Path, seed: int, *overrides: str) -> RunConfig:
    """Return the configuration of an arm on a cohort, from the published file."""
    path = (data / "brain_morphometry" / FILES[cohort]).resolve()
    settings = [f"seed={seed}", f"simulator.data.path={path}", *arm.overrides, *overrides]
    return load_config(CONFIGS / f"{arm.config}.yaml", settings)


def run_fold(cohort: str, label: str, seed: int, fold: int, data: Path) -> dict[str, Any]:
    """Return errors and predictions of every test subject of a fold, and the bytes of the run."""
    split = f"task.split={{folds: {FOLDS}, fold: {fold}, validation: 0.1}}"
    if label == BASELINES:
        return run_baselines(load_arm(ARMS["FedAvg"], cohort, data, seed, split))
    arm = ARMS[label]
    config = load_arm(arm, cohort, data, seed, split)
    assembly = assemble(config)
    sites = {name: open_site(assembly, own) for name, own in prepare_site_data(config, assembly.task, Path()).items()}
    sent = 0
    if arm.is_pooled:
        weights = train_on_pooled(assembly, sites)
        for site in sites.values():
            site.evaluate(weights)
    else:
        _, ledger = run_assembly(config, assembly, sites)
        sent = sum(line.payload_bytes for line in ledger.lines)
    return {
        "bytes": sent,
        "sites": {name: predict(site) for name, site in sites.items() if site.trainer.num_test_examples},
    }


def train_on_pooled(assembly: Assembly, sites: dict[str, Site]) -> torch.Tensor:
    """Return the weights trained on the training examples of all sites together."""
    first = next(iter(sites.values()))
    train: ConcatDataset[Any] = ConcatDataset([site.trainer.examples.train for site in sites.values()])
    examples = Examples(train, first.trainer.examples.test)
    pooled = build_site(LocalTask.open("pooled", assembly.task, examples, assembly.layout, assembly.method.seed))
    statistics = build_statistics_mask(assembly.layout)
    weights = statistics.put(
        statistics.take(pooled.trainer.compute_statistics(pooled.weights)), assembly.weights.clone()
    )
    for t in range(1, assembly.method.config.rounds + 1):
        # One round at a time, with the learning rate that the schedule gives it.
        training = assembly.method.config.get_training(t)
        with limit_threads(1):
            weights = pooled.train(weights, Mask.full(assembly.layout.size), training, 1)
    return weights


def predict(site: Site) -> dict[str, list[float]]:
    """Return predictions, targets and identifiers of a site's test subjects, by the model that it evaluated last."""
    assert site.evaluated is not None, "every site has evaluated its final model"
    layout, weights = site.evaluated
    model = site.trainer.task.model()
    model.load_state_dict(layout.unflatten(weights), strict=False)
    predictions, targets = site.trainer.task.measure_all(model, site.trainer.examples.test)
    ids: list[Any] = list(site.trainer.examples.test_ids)
    return {"ids": ids, "targets": targets[:, 0].tolist(), "run": predictions[:, 0].tolist()}


def run_baselines(config: RunConfig) -> dict[str, Any]:
    """Return the predictions of site means and ridge regressions."""
    assembly = assemble(config)
    sites = {name: open_site(assembly, own) for name, own in prepare_site_data(config, assembly.task, Path()).items()}
    rows = {name: tabulate(site) for name, site in sites.items()}
    fitted = fit_baselines("regression", rows)
    results, start = {}, 0
    for name, site in sites.items():
        if not (count := site.trainer.num_test_examples):
            continue
        own = {key: values[start : start + count, 0].tolist() for key, values in fitted.items()}
        targets = rows[name].test.y[:, 0].tolist()
        results[name] = {"ids": list(site.trainer.examples.test_ids), "targets": targets, **own}
        start += count
    return {"bytes": 0, "sites": results}


def tabulate(site: Site) -> SiteRows:
    """Return a site's examples as rows."""
    examples = site.trainer.examples
    parts = (site.trainer.task.tabulate_all(part) for part in (examples.train, examples.validation, examples.test))
    return SiteRows(*(label_rows(site.name, x.double().numpy(), y.double().numpy()) for x, y in parts))


def run_left_out(cohort: str, left_out: str, label: str, seed: int, data: Path) -> dict[str, Any]:
    """Train without one site; return its errors with the adapted model and with training on its first subjects alone.

    The first 20 subjects in the order of the split adapt the model, 4 of them for validation; all others are tested.
    """
    config = load_arm(ARMS[label], cohort, data, seed, "task.split={validation: 0.1}")
    assembly = assemble(config)
    located = prepare_site_data(config, assembly.task, Path())
    own = located.pop(left_out)
    sites = {name: open_site(assembly, where) for name, where in located.items()}
    assert own.subset is not None, "a partition names its subjects"
    count = len(own.subset)
    share = f"task.split={{test: {(count - FIRST) / count}, validation: {4 / count}}}"
    adapted = open_newcomer(load_arm(ARMS[label], cohort, data, seed, share), own)
    outcome, _ = run_assembly(config, assembly, sites)
    adapted.weights = outcome.weights.clone()
    adapted.evaluate(assembly.method.adapt(adapted, outcome.mask))
    alone_config = load_arm(ARMS["local network"], cohort, data, seed, share)
    alone_assembly = assemble(alone_config)
    alone = {left_out: open_site(alone_assembly, own)}
    run_assembly(alone_config, alone_assembly, alone)
    plain = load_arm(ARMS["FedAvg"], cohort, data, seed, share)
    rows = {left_out: tabulate(open_site(assemble(plain), own))}
    ridge = fit_baselines("regression", rows)
    result: dict[str, Any] = predict(adapted)
    result |= {"network alone": predict(alone[left_out])["run"]}
    result |= {"ridge alone": ridge["ridge_local"][:, 0].tolist(), "site mean": ridge["site_mean"][:, 0].tolist()}
    return {"bytes": 0, "sites": {left_out: result}}


def open_newcomer(config: RunConfig, own: SiteData) -> Site:
    """Return a site that takes no part in the run."""
    return open_site(assemble(config), own)


def list_left_out(cohort: str, data: Path) -> list[str]:
    """Return the sites with at least twice as many subjects as adapt the model."""
    config = load_arm(ARMS["FedAvg"], cohort, data, 1)
    located = prepare_site_data(config, assemble(config).task, Path())
    return [name for name, own in located.items() if len(own.subset or ()) >= 2 * FIRST]


def list_jobs(cohorts: list[str], seeds: list[int], data: Path, *, left_out: bool) -> Iterator[tuple[str, Any]]:
    """Yield the name of each file and the function that computes it, so that all arms of a fold come together."""
    for seed, cohort in product(seeds, cohorts):
        if left_out:
            for site, label in product(list_left_out(cohort, data), ADAPTED):
                yield f"{cohort}/left-out {site} {label} {seed}", (run_left_out, cohort, site, label, seed, data)
            continue
        for fold, label in product(range(1, FOLDS + 1), (BASELINES, *ARMS)):
            yield f"{cohort}/{label} {seed} {fold}", (run_fold, cohort, label, seed, fold, data)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with brain_morphometry/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=FILES, nargs="+", default=list(FILES))
    parser.add_argument("--left-out", action="store_true", help="one site takes no part; else five folds")
    parser.add_argument("--out", type=Path, default=Path("runs/cohorts"))
    parser.add_argument("--docs", action="store_true", help="write docs/results/age.md from the files in --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.docs:
        update_docs(arguments.out)
        return 0
    for name, (compute, *values) in list_jobs(
        arguments.only, arguments.seeds, arguments.data, left_out=arguments.left_out
    ):
        file = arguments.out / f"{name}.json".replace(" ", "_")
        file.parent.mkdir(parents=True, exist_ok=True)
        with claim(file) as is_claimed:
            if not is_claimed:
                continue
            start = time.monotonic()
            row = compute(*values)
            row["seconds"] = time.monotonic() - start
            write_json(file, row)
        errors = [np.abs(np.subtract(site["run"], site["targets"])) for site in row["sites"].values() if "run" in site]
        shown = f"{np.concatenate(errors).mean():.2f}" if errors else "done"
        print(f"{name}: {shown}, {row['seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
