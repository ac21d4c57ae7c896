"""AUC and bytes of SCBF, SCBFwP and their baselines on death in hospital, predicted from medications.

    python benchmarks/experiments/scbf_mortality.py ../shared/data [--seeds 3] [--only eicu] [--out runs/scbf]

Cohorts: ``eicu`` (eICU demo, first-day medications, five regions), ``diabetes-iid`` (Diabetes 130-US, five equal sites)
and ``diabetes-age`` (the same by age band). Every method trains with each optimiser until its AUC on validation stays
has not risen for 20 rounds; validation stays choose the optimiser and the round, test stays nothing. Logistic
regressions of each site and of all sites stand beside. The global model is evaluated on the test stays of all sites
together after every round. All sites run in one process and use the real wire. Each run writes one JSON file: finished
runs are not repeated and several processes may share the work. ``--docs`` writes tables of
``docs/results/tables.md`` and ``docs/images/scbf_convergence.png`` from these files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from page_tables import write_section
from runs import claim
from torch import Tensor
from torch.utils.data import TensorDataset

from flare_sparse.config.assemble import Assembly, assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.exchange import Contribution
from flare_sparse.results.runs.baselines import SiteRows, fit_baselines, label_rows
from flare_sparse.rounds.federation.records import RoundRecord
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.tasks.classes import compute_risk_metrics
from flare_sparse.tasks.task import VALIDATION, Examples
from flare_sparse.training import LocalTask, Site, build_site
from flare_sparse.training.private import SilentTrainer
from flare_sparse.wire.ledger import Ledger

mpl.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "app_configs" / "scbf_mortality.yaml"
"""Tables of the page that are files of their own, by number."""
METHODS = {
    "FedAvg": "name: fedavg",
    "FedAvg, server step x 5": "name: fedavg, server: {lr: 5}",
    "SCBF 10 %": "name: scbf, rate: 0.1",
    "SCBF 30 %": "name: scbf, rate: 0.3",
    "SCBF 100 %": "name: scbf, rate: 1",
    "SCBF 30 %, mean": "name: scbf, rate: 0.3, aggregation: mean",
    "SCBF budget 10 %": "name: scbf, budget: 0.1",
    "SCBFwP 30 %, 47 % pruned": "name: scbfwp, rate: 0.3, prunings: 6",
    "FAwP, 47 % pruned": "name: fawp, prunings: 6",
    "DSSGD 30 %": "name: dssgd, rate: 0.3",
}
OPTIMIZERS = {
    "SGD 0.01": "optimizer: sgd, lr: 0.01",
    "SGD 0.1": "optimizer: sgd, lr: 0.1",
    "Adam 0.001": "optimizer: adam, lr: 1e-3",
}
LOGISTIC = {"logistic_local": "logistic regression, each site alone", "logistic_pooled": "logistic regression, pooled"}
PATIENCE = 20
"""Rounds without a better AUC on the validation stays of all sites after which a run ends."""
DIABETES = (
    "{name: table, kind: binary, target: expired, features: ['dose_{0..68}'], rows: {first_encounter: 1}, "
    "scaling: none, model: {name: mlp, hidden: [64, 32]}}"
)


@dataclass(frozen=True)
class Cohort:
    """A data set, its partition into sites, and the longest training: rounds, epochs a round, examples a minibatch."""

    title: str
    file: str
    partition: str
    rounds: int
    epochs: int
    batch_size: int
    overrides: tuple[str, ...] = ()


COHORTS = {
    "eicu": Cohort(
        "eICU demo: 1,834 stays with medications, 420 codes, five regions",
        "eicu_demo/mortality.npz",
        "kind: natural, column: region",
        150,
        5,
        32,
    ),
    "diabetes-iid": Cohort(
        "Diabetes 130-US: 71,518 first stays, 23 medicines at three doses, five equal sites",
        "diabetes130/mortality.npz",
        "kind: iid",
        100,
        1,
        256,
        (f"task={DIABETES}", "simulator.sites=5"),
    ),
    "diabetes-age": Cohort(
        "Diabetes 130-US by age band: ten sites, 154 to 18,210 stays",
        "diabetes130/mortality.npz",
        "kind: natural, column: age_band",
        100,
        1,
        256,
        (f"task={DIABETES}",),
    ),
}


@dataclass
class Run:
    """Figures of one method with one optimiser on one cohort with one seed.

    Attributes:
        curve: metrics of the global model after each round.
        up, down: bytes sent until the end of each round, in both directions.
        uploaded: mean share of the parameters in an upload.
        seconds: time of all rounds.
    """

    curve: list[dict[str, float]] = field(default_factory=list)
    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    uploaded: float = 0.0
    seconds: float = 0.0

    @property
    def best(self) -> int:
        """Index of the round with the highest AUC on validation stays."""
        return max(range(len(self.curve)), key=lambda t: self.curve[t].get(f"{VALIDATION}auc", 0.0))

    @property
    def validation(self) -> float:
        """Highest AUC on validation stays."""
        return self.curve[self.best].get(f"{VALIDATION}auc", 0.0)


class EvaluatedMethod:
    """A method whose global model is evaluated on all test stays together after every round of training."""

    def __init__(self, assembly: Assembly, pooled: Site, result: Run, ledger: Ledger):
        self._method, self._pooled, self._result, self._ledger = assembly.method, pooled, result, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def configure_for(self, capabilities: Any) -> EvaluatedMethod:
        self._method = self._method.configure_for(capabilities)
        return self

    def learn(self, state: Any, updates: Sequence[Contribution]) -> Any:
        new_state = self._method.learn(state, updates)
        if new_state.round > state.round:
            weights: Tensor = self._method.model(new_state).to_vector()
            self._result.curve.append(self._pooled.evaluate(weights))
            for sent, direction in ((self._result.up, "up"), (self._result.down, "down")):
                sent.append(sum(line.payload_bytes for line in self._ledger.lines if line.direction == direction))
            if len(self._result.curve) > self._result.best + PATIENCE:
                raise Converged
        return new_state


class Converged(Exception):
    """The AUC on validation stays has not risen for a while."""


def open_cohort(cohort: Cohort, data: Path, method: str, training: str, seed: int) -> tuple[Assembly, dict[str, Site]]:
    """Return the parts of a job and the sites with their examples."""
    settings = f"training: {{epochs: {cohort.epochs}, batch_size: {cohort.batch_size}, {training}}}"
    path = data / cohort.file if cohort.file.startswith("eicu") else write_doses(data / cohort.file)
    config = load_config(
        CONFIG,
        [
            f"simulator.data={{path: {path}, partition: {{{cohort.partition}}}}}",
            f"method={{{method}, rounds: {cohort.rounds}, {settings}}}",
            f"seed={seed}",
            *cohort.overrides,
            "task.split.validation=0.1",
        ],
    )
    assembly = assemble(config)
    with tempfile.TemporaryDirectory() as folder:
        site_data = prepare_site_data(config, assembly.task, Path(folder))
    return assembly, {name: open_site(assembly, own) for name, own in site_data.items()}


@cache
def write_doses(file: Path) -> Path:
    """Write the data set with one input of 0 or 1 for each dose of each medicine; return the new file."""
    with np.load(file) as arrays:
        columns = {name: arrays[name] for name in ("expired", "first_encounter", "age_band")}
        doses = arrays["meds"][:, :, None] == np.arange(1, 4, dtype=np.uint8)
    path = Path(tempfile.mkdtemp(prefix="flare-sparse-")) / "doses.npz"
    np.savez(path, dose=doses.reshape(len(doses), -1).astype(np.uint8), **columns)
    return path


def run(cohort: Cohort, data: Path, method: str, training: str, seed: int) -> Run:
    """Run one method in this process until its validation AUC stays, and return its figures."""
    assembly, sites = open_cohort(cohort, data, method, training, seed)
    parts = [site.trainer.examples for site in sites.values()]
    validation = pool([part.validation for part in parts if part.validation is not None])
    examples = Examples(parts[0].train, pool([part.test for part in parts]), validation=validation)
    pooled = build_site(LocalTask.open("pooled", assembly.task, examples, assembly.layout, seed))
    result, ledger = Run(), Ledger()

    def add_seconds(record: RoundRecord) -> None:
        result.seconds += record.seconds

    # The stays of all sites are evaluated together.
    sites = {name: Site(name, SilentTrainer(site.trainer), site.site_settings) for name, site in sites.items()}
    method_with_curve: Any = EvaluatedMethod(assembly, pooled, result, ledger)
    with suppress(Converged):
        run_locally(
            method_with_curve,
            assembly.weights,
            sites,
            assembly.task.metric,
            ledger=ledger,
            course=Course(on_round=add_seconds),
        )
    up = [line for line in ledger.lines if line.direction == "up" and line.kind == "train"]
    result.uploaded = sum(line.scalars_sent for line in up) / (len(up) * assembly.layout.size)
    return result


def pool(parts: Sequence[Any]) -> TensorDataset:
    """Return the rows of all parts as one data set, whose minibatches are read at once."""
    return TensorDataset(*(torch.cat(column) for column in zip(*(part.tensors for part in parts), strict=True)))


def run_logistic(cohort: Cohort, data: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return the metrics of logistic regressions on the test stays of all sites together."""
    assembly, sites = open_cohort(cohort, data, METHODS["FedAvg"], OPTIMIZERS["SGD 0.01"], seed)
    rows = {}
    for name, site in sites.items():
        own = site.trainer.examples
        tables = (assembly.task.tabulate_all(part) for part in (own.train, own.validation, own.test))
        rows[name] = SiteRows(*(label_rows(name, x.double().numpy(), y.double().numpy()) for x, y in tables))
    fitted = fit_baselines("binary", rows)
    died = torch.cat([torch.from_numpy(own.test.y[:, 0]) for own in rows.values() if len(own.test.y)])
    return {name: compute_risk_metrics(torch.from_numpy(fitted[name][:, 0]), died) for name in LOGISTIC}


def list_jobs(cohorts: Sequence[str], seeds: int) -> Iterator[tuple[str, str, str, int]]:
    """Yield cohort, method, optimiser and seed of each run; an empty optimiser stands for the logistic regressions."""
    for seed, name in product(range(1, seeds + 1), cohorts):
        yield name, "logistic", "", seed
        for method, optimizer in product(METHODS, OPTIMIZERS):
            yield name, method, optimizer, seed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with eicu_demo and diabetes130")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=COHORTS, nargs="+", default=list(COHORTS))
    parser.add_argument("--out", type=Path, default=Path("runs/scbf"))
    parser.add_argument("--docs", action="store_true", help="update docs/results/tables.md and its plot from --out")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, method, optimizer, seed in list_jobs(arguments.only, arguments.seeds):
        file = arguments.out / name / f"{method} {optimizer} {seed}.json".replace(" ", "_")
        file.parent.mkdir(parents=True, exist_ok=True)
        with claim(file) as is_claimed:
            if not is_claimed:
                continue
            cohort, data = COHORTS[name], arguments.data.resolve()
            figures = (
                asdict(run(cohort, data, METHODS[method], OPTIMIZERS[optimizer], seed))
                if optimizer
                else run_logistic(cohort, data, seed)
            )
            part = file.with_suffix(".new")
            part.write_text(json.dumps(figures) + "\n")
            part.replace(file)
            print(f"{name}, seed {seed}, {method} {optimizer}: done", flush=True)
    if arguments.docs:
        update_docs(arguments.out)
    return 0


def update_docs(folder: Path) -> None:
    """Write the tables and the plot from the files in ``folder``; the findings above the tables are kept."""
    results = {name: read_runs(folder / name) for name in COHORTS if (folder / name).is_dir()}
    tables = [format_table(COHORTS[name], runs, folder / name) for name, runs in results.items()]
    write_section("tables", "scbf", "\n".join(tables))
    plot_auc({name: {label: own[1] for label, own in runs.items()} for name, runs in results.items()},
             ROOT / "docs" / "images" / "scbf_convergence.png")  # fmt: skip


def read_runs(folder: Path) -> dict[str, tuple[str, list[Run]]]:
    """Return optimiser and runs of each method: the optimiser with the highest mean AUC on validation stays."""
    chosen = {}
    for method in METHODS:
        candidates = []
        for optimizer in OPTIMIZERS:
            files = sorted(folder.glob(f"{method} {optimizer} *.json".replace(" ", "_")))
            runs = [Run(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
            if runs:
                candidates.append((fmean(one.validation for one in runs), optimizer, runs))
        if candidates:
            _, optimizer, runs = max(candidates, key=lambda candidate: candidate[0])
            chosen[method] = optimizer, runs
    return chosen


def format_table(cohort: Cohort, runs: dict[str, tuple[str, list[Run]]], folder: Path) -> str:
    """Return Markdown: means and standard deviations over the seeds."""
    seeds = len(next(iter(runs.values()))[1])
    columns = ["", "optimiser", "AUC-ROC", "AUC-PR", "calibration error", "rounds", "parameters uploaded"]
    lines = [
        f"## {cohort.title}",
        "",
        f"Local epochs a round: {cohort.epochs}; batches of {cohort.batch_size}; at most {cohort.rounds} rounds.",
        f"Seeds: {seeds}.",
        "",
        f"| {' | '.join([*columns, 'MB up', 'MB down'])} |",
        "| --- |" + " --- |" * 8,
    ]
    files = sorted(folder.glob("logistic*.json"))
    for name, label in LOGISTIC.items():
        figures = [json.loads(file.read_text(encoding="utf-8"))[name] for file in files]
        if figures:
            lines.append(f"| {label} |  | " + " | ".join(format_metrics(figures)) + " |  |  |  |  |")
    for label, (optimizer, own) in runs.items():
        cells = [
            optimizer,
            *format_metrics([one.curve[one.best] for one in own]),
            f"{fmean(one.best + 1 for one in own):.0f}",
            f"{fmean(one.uploaded for one in own):.0%}",
            f"{fmean(one.up[one.best] for one in own) / 1e6:.1f}",
            f"{fmean(one.down[one.best] for one in own) / 1e6:.1f}",
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def format_metrics(figures: Sequence[dict[str, float]]) -> list[str]:
    """Return mean and standard deviation of each metric of the tables."""
    return [format_spread([one[name] for one in figures]) for name in ("auc", "auc_pr", "calibration_error")]


def format_spread(values: Sequence[float]) -> str:
    """Return the mean and, with several values, the standard deviation."""
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def plot_auc(results: dict[str, dict[str, list[Run]]], path: Path) -> None:
    """Draw the AUC-ROC by round, mean over the seeds."""
    plt.style.use("flare_sparse.results.report.plots")
    figure, axes = plt.subplots(1, len(results), figsize=(4.6 * len(results), 4.2), layout="constrained", squeeze=False)
    for axis, (name, runs) in zip(axes[0], results.items(), strict=True):
        for number, (label, found) in enumerate(runs.items()):
            # Runs end at different rounds: the mean is over those that all of them have.
            length = min(len(one.curve) for one in found)
            curves = torch.tensor([[figures["auc"] for figures in one.curve[:length]] for one in found])
            style = "--" if label.startswith("FedAvg") else ":" if label.startswith(("FAwP", "DSSGD")) else "-"
            axis.plot(range(1, curves.shape[1] + 1), curves.mean(0), style, color=f"C{number}", label=label)
        axis.set(title=name, xlabel="round")
    axes[0][0].set_ylabel("AUC-ROC, all test stays")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.suptitle("Death in hospital from medications: AUC by round, mean of the seeds")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
