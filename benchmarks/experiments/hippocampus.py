"""Dice and HD95 of the hippocampus by method and sparsity: where sparsity begins to cost.

Four sites (A, B cut in two, C) of the public data set of docs/segmentation.md train
`app_configs/fedavg_hippocampus.yaml` with every method, sparsity, seed and fold; beside them the pooled data of all
sites and each site alone.

    python benchmarks/experiments/hippocampus.py ../shared/data/hippocampus --runs runs/hippocampus [--seeds 3]
        [--folds 5] [--sparsities 0.9] [--rows pooled fedavg] [--set method.rounds=20] [--picture cases.png]

Every run has a folder below `--runs` with checkpoints, so that a killed call goes on from the last committed round when
it is repeated, and afterwards with the record that `flare-sparse predict` reads. Metrics are computed once, at the end
of a run: those of every round would take a third of the time. `--validation 0.2` trains on fewer cases and measures
these instead of the test cases, for choosing settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hippocampus_report import draw_cases, print_report
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from flare_sparse.config.assemble import Assembly, assemble, open_checkpoints, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.params import Layout
from flare_sparse.results.runs.local import run_assembly
from flare_sparse.results.runs.record import RecordWriter, sum_traffic
from flare_sparse.rounds.local.run import Course
from flare_sparse.tasks.segmentation import Segmentation, name_metrics
from flare_sparse.tasks.task import Examples
from flare_sparse.training import LocalTask, Site, SitePrivacy, build_site
from flare_sparse.training.private import SilentTrainer
from flare_sparse.training.trainer import Trainer
from flare_sparse.wire.ledger import Ledger

CONFIG = Path(__file__).parents[2] / "app_configs" / "fedavg_hippocampus.yaml"
SHORT = {
    "topk_both": ("topk_ef", "int2"),
    "neurosfl_int4": ("neurosfl", "int4"),
    "neurosfl_int2": ("neurosfl", "int2"),
}
"""Method and values of the rows whose sites build the initial model: top-k at both ends, and NeuroSFL with scores of no
more entries than stay live."""
SPARSE = ("neurosfl", "fedsparsify", "topk_ef", *SHORT)
DENSE = ("pooled", "fedavg", "local_only")
DECAY = 0.9
LINE = "line.json"
"""File of a finished run with its settings and the metrics of each case."""


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        row: method, or ``pooled``, or one of ``SHORT``.
        sparsity: share of the entries that is off, or, for ``topk_ef``, that is not sent.
        seed: seed of the run.
        fold: fold for testing, from 1.
        folds: number of folds.
        overrides: settings that differ from the configuration.
        validation: share of the cases that are measured in place of the test cases; 0: none.
    """

    row: str
    sparsity: float
    seed: int
    fold: int
    folds: int
    overrides: tuple[str, ...] = ()
    validation: float = 0.0

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"{self.row}-{self.sparsity:g}-seed{self.seed}-fold{self.fold}of{self.folds}"

    def load_config(self, data: Path) -> RunConfig:
        """Return the configuration of the run.

        A site alone and the pooled data are federations of one site, which average nothing.
        """
        base = load_config(CONFIG, list(self.overrides))
        name, values = SHORT.get(self.row, ("fedavg" if self.row in DENSE else self.row, "float32"))
        method: dict[str, Any] = {
            "name": name,
            "rounds": base.method.config.rounds,
            "training": base.method.config.training.model_dump(mode="json"),
        }
        share = round(1 - self.sparsity, 6)
        if name == "topk_ef":
            method["fraction"] = share
        elif name != "fedavg":
            method["sparsity"] = self.sparsity
        if self.row == "topk_both":
            method |= {"down": share, "decay": DECAY}
        elif self.row in SHORT:
            method["score_share"] = share
        overrides = [*self.overrides, f"method={json.dumps(method)}", f"seed={self.seed}", "task.hd95=true"]
        if self.row in SHORT:
            overrides += [f"wire.values={values}", "wire.initial_model=built"]
        overrides += [f"simulator.data.path={data.resolve()}", f"task.split.validation={self.validation}"]
        if self.folds > 1:
            overrides += [f"task.split.folds={self.folds}", f"task.split.fold={self.fold}"]
        return load_config(CONFIG, overrides)


def run_setting(setting: Setting, data: Path, folder: Path) -> dict[str, Any]:
    """Run one setting, or the rest of it, and return its line: metrics of each case by site, bytes and seconds."""
    config = setting.load_config(data)
    assembly = assemble(config)
    sites = {name: open_site(assembly, site) for name, site in prepare_site_data(config, assembly.task, data).items()}
    classes = list(config.task.config.classes)  # type: ignore[attr-defined]
    return {
        "row": setting.row,
        "sparsity": setting.sparsity,
        "seed": setting.seed,
        "fold": setting.fold,
        "metrics": name_metrics(classes, hd95=True),
        **run_row(setting.row, config, assembly, sites, folder, validation=bool(setting.validation)),
    }


def run_row(
    row: str,
    config: RunConfig,
    assembly: Assembly,
    sites: dict[str, Site],
    folder: Path,
    *,
    validation: bool = False,
    wrap: Callable[[Trainer], Trainer] = SilentTrainer,
) -> dict[str, Any]:
    """Train the pooled data, each site alone or a federation; return the metrics of each case, bytes and seconds."""
    sites = {name: Site(name, wrap(site.trainer)) for name, site in sites.items()}
    groups = {"all": sites}
    if row == "pooled":
        groups = {"pooled": {"pooled": Site("pooled", wrap(pool(assembly, sites, config.seed)))}}
    elif row == "local_only":
        groups = {name: {name: site} for name, site in sites.items()}
    runs = {
        name: train(group, config, assembly, folder / name if row == "local_only" else folder)
        for name, group in groups.items()
    }
    common = next(iter(runs.values()))[0]
    models = {name: runs[name][0] if name in runs else common for name in sites}
    return {
        "sites": {
            name: measure_cases(assembly, site, models[name], validation=validation) for name, site in sites.items()
        },
        "bytes": sum(sent for _, sent, _ in runs.values()) if row not in ("pooled", "local_only") else 0,
        "seconds": sum(seconds for _, _, seconds in runs.values()),
        "parameters": assembly.layout.size,
        "training": config.method.config.training.model_dump(mode="json") | {"rounds": config.method.config.rounds},
    }


def pool(assembly: Assembly, sites: dict[str, Site], seed: int) -> Trainer:
    """Return the trainer of a site with the training cases of all sites."""
    examples = Examples(
        ConcatDataset([site.trainer.examples.train for site in sites.values()]),
        ConcatDataset([site.trainer.examples.test for site in sites.values()]),
    )
    local = LocalTask.open("pooled", assembly.task, examples, assembly.layout, seed)
    return build_site(local, privacy=SitePrivacy(sends_metrics=False)).trainer


def train(sites: dict[str, Site], config: RunConfig, assembly: Assembly, folder: Path) -> tuple[Tensor, int, float]:
    """Run the method over the sites, from its newest checkpoint; return the weights, the bytes and the seconds."""
    ledger = Ledger()
    record = RecordWriter(folder, config, assembly, ledger)

    def commit(line: Any) -> None:
        record.commit(line)
        print(f"{time.strftime('%H:%M:%S')} {folder.name}: round {line.round}, {line.seconds:.0f} s", flush=True)

    outcome, _ = run_assembly(
        config,
        assembly,
        sites,
        ledger=ledger,
        course=Course(
            stores=lambda end: open_checkpoints(config.job, assembly, folder / "checkpoints", end),
            resume=True,
            on_round=commit,
        ),
    )
    record.finish(outcome)
    sent = sum(int(part["payload_bytes"]) for part in sum_traffic(ledger).values())
    return outcome.weights, sent, sum(line.seconds for line in outcome.rounds)


def select_measured(site: Site, *, validation: bool = False) -> tuple[Any, tuple[str, ...]]:
    """Return the cases that are measured and their identifiers."""
    examples = site.trainer.examples
    if validation:
        return examples.validation, tuple(examples.validation_ids)
    return examples.test, tuple(examples.test_ids)


@torch.no_grad()
def measure_cases(
    assembly: Assembly, site: Site, weights: Tensor, *, validation: bool = False
) -> dict[str, list[float]]:
    """Return the metrics of each test case by its identifier, of a site's model with what the site has kept."""
    network = load_network(assembly, *site.trainer.complete(weights, site.trainer.memory))
    cases, names = select_measured(site, validation=validation)
    rows = [assembly.task.measure(network, batch)[0][0] for batch in assembly.task.iterate_batches(cases, 1)]
    return {name: row.tolist() for name, row in zip(names, rows, strict=True)}


def load_network(assembly: Assembly, layout: Layout, weights: Tensor) -> torch.nn.Module:
    """Return the network with the given weights, in eval mode."""
    network = assembly.task.model()
    network.load_state_dict(layout.unflatten(weights), strict=False)
    return network.eval()


def list_settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield the settings, seed by seed, so that a series that is cut short has every row."""
    rows = [(row, 0.0) for row in DENSE] + [(row, sparsity) for sparsity in options.sparsities for row in SPARSE]
    for seed in range(1, options.seeds + 1):
        for fold in range(1, options.folds + 1):
            for row, sparsity in rows:
                if not options.rows or row in options.rows:
                    yield Setting(row, sparsity, seed, fold, options.folds, tuple(options.set), options.validation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folds", type=int, default=1, help="1: the split by seed, 52 test cases")
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.9, 0.95, 0.98, 0.8])
    parser.add_argument("--rows", nargs="+", choices=[*DENSE, *SPARSE])
    parser.add_argument("--set", nargs="+", default=[], help="settings that differ from the configuration")
    parser.add_argument("--validation", type=float, default=0.0)
    parser.add_argument("--finished", action="store_true", help="print the finished runs and start none")
    parser.add_argument("--picture", type=Path, help="draw the best, the median and the worst case of the dense run")
    options = parser.parse_args()
    settings, lines = list(list_settings(options)), []
    for setting in settings:
        folder = options.runs / setting.name
        if not (folder / LINE).is_file():
            if options.finished:
                continue
            line = run_setting(setting, options.data, folder)
            (folder / LINE).write_text(json.dumps(line))
        lines.append(json.loads((folder / LINE).read_text()))
    print_report(lines)
    if options.picture:
        illustrate(settings, options)


def illustrate(settings: list[Setting], options: argparse.Namespace) -> None:
    """Draw the best, the median and the worst test case of the first sparse run, or of the first run."""
    finished = [setting for setting in settings if (options.runs / setting.name / "model.safetensors").is_file()]
    setting = next((setting for setting in finished if setting.row in SPARSE), finished[0])
    config = setting.load_config(options.data)
    assembly = assemble(config)
    assert isinstance(assembly.task, Segmentation)
    from flare_sparse.results.runs.load import read_run_model

    network = load_network(assembly, assembly.layout, read_run_model(options.runs / setting.name, assembly, "final"))
    line = json.loads((options.runs / setting.name / LINE).read_text())
    ranked = sorted(
        (
            (values[0], site, number)
            for site, cases in line["sites"].items()
            for number, values in enumerate(cases.values())
        ),
        reverse=True,
    )
    data, pictures = prepare_site_data(config, assembly.task, options.data), []
    for dice, site, number in (ranked[0], ranked[len(ranked) // 2], ranked[-1]):
        cases, _ = select_measured(open_site(assembly, data[site]), validation=bool(setting.validation))
        batch = next(assembly.task.iterate_batches(Subset(cases, [number]), 1))
        pictures.append((site, dice, assembly.task.illustrate(network, batch)))
    draw_cases(pictures, options.picture)


if __name__ == "__main__":
    main()
