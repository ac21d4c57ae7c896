"""Adaptation of MetaGater and its baselines to target sites: images of two classes a site, and brain age.

    python benchmarks/experiments/metagater.py cifar_small ../shared/data --rounds 120 --seeds 1 2 3
    python benchmarks/experiments/metagater.py cifar_main ../shared/data --rounds 200 --seeds 1 2 3
    python benchmarks/experiments/metagater.py cifar_moderate ../shared/data --rounds 400 --seeds 1 2 3
    python benchmarks/experiments/metagater.py mnist ../shared/data --rounds 200 --seeds 1 2 --curve
    python benchmarks/experiments/metagater.py brain ../shared/data --rounds 100 --seeds 1 2 3

Target sites take no part in training. Every site keeps 20 % of its examples for validation or testing: those of the
training sites choose the steps of each arm and seed, those of the targets choose nothing. The step of adaptation, and
the step of training where an arm lists several, are those whose model is best on the validation examples after one step
on the training examples of each training site; in ``cifar_main`` of ten of them, drawn by the seed. ``--curve`` trains
with the chosen step again for fewer rounds: the arms have no schedule, so that these are the rounds of the long run.

Each run is one process without FLARE, ends with the same bits as a FLARE job, and writes one JSON file to ``--out``:
finished runs are not repeated, several processes may share the work. ``metagater_report.py`` turns the files into
docs/results/texts.md and its plot. MetaSNIP runs last: it needs the backbone of MetaGater without gates and the
sparsity of MetaGater with gates.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import claim
from torch import Tensor
from torch.utils.data import ConcatDataset, TensorDataset

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.core.exchange import Contribution, Patch, Request
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.adaptation import ADAPT
from flare_sparse.results.runs.model_files import read_model, save_model
from flare_sparse.rounds.federation.records import Evaluation
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.data.partition import FewClassesPartition, NaturalPartition
from flare_sparse.tasks.data.tables import read_table
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, Metric, SiteData, Task
from flare_sparse.training import LocalTask, Site, build_site

EMPTY = TensorDataset(torch.zeros(0))
ADAPT_RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
OPEN_BIAS = 0.1
PARTICIPATION = 0.5
LAMBDA = 0.2
LASSO = 2e-5


@dataclass(frozen=True)
class Arm:
    """One row of a table.

    Attributes:
        method: its name.
        settings: settings of the method.
        steps: settings of training to choose among, each with its name in the table.
        gated: whether the network has gates.
    """

    method: str
    settings: dict[str, Any]
    steps: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    gated: bool = False


@dataclass(frozen=True)
class Setting:
    """One table: sites, network and arms.

    Attributes:
        task: name of the task.
        task_settings: its settings.
        layers: layers with gates.
        arms: the rows, by label.
        sites: numbers of sites and of their examples.
        file: images below the data folder.
        participation: share of the sites in a round.
        validation_sites: number of training sites that choose the steps, drawn by the seed; None: all.
    """

    task: str
    task_settings: dict[str, Any]
    layers: tuple[str, ...]
    arms: dict[str, Arm]
    sites: dict[str, int]
    validation_sites: int | None = None
    file: str = "cifar10/cifar10_jpeg.npz"
    participation: float = PARTICIPATION


def build_cifar_arms(batch: int, alphas: tuple[float, ...], pruned: Sequence[str] = ("2.0.conv",)) -> dict[str, Arm]:
    """Return the arms on CIFAR-10. MetaGater's step is lambda times its learning rate.

    Args:
        batch: size of the minibatches.
        alphas: inner steps of Per-FedAvg to choose among.
        pruned: convolutions whose channels MetaSNIP scores.
    """
    plain = {"training": {"optimizer": "sgd", "batch_size": batch, "lr": 0.1}}
    proximal = {"training": {**plain["training"], "lr": 0.1 / LAMBDA}, "momentum_cap": 0.9, "lasso": 0}
    # The inner step of Per-FedAvg is a setting of its training.
    inner = {f"alpha {alpha:g}": {"adapt_lr": alpha} for alpha in alphas}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", plain),
        "Per-FedAvg (FO)": Arm("per_fedavg", plain, inner),
        "MetaGater with gates": Arm(
            "metagater", {**proximal, "lasso": LASSO, "closed_channels": "permanent"}, gated=True
        ),
        "MetaGater without gates": Arm("metagater", proximal),
        "MetaSNIP": Arm("metasnip", {**proximal, "layers": list(pruned)}),
    }


def build_mnist_arms() -> dict[str, Arm]:
    """Return the arms of Table 1, without gates, by local steps; xi is the accuracy of local solutions."""
    plain = {"optimizer": "sgd", "batch_size": 64}
    rates = (0.025, 0.05, 0.1, 0.2)
    by_rate = {f"lr {rate:g}": {"training": {**plain, "lr": rate}} for rate in rates}
    inner = {f"{name}, alpha 0.05": {**settings, "adapt_lr": 0.05} for name, settings in by_rate.items()}
    proximal = {f"lr {rate:g}": {"training": {**plain, "lr": rate / LAMBDA}} for rate in rates}
    gater = {"proximity": LAMBDA, "momentum_cap": 0.9, "lasso": 0}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", {"local_steps": 1}, by_rate),
        "Per-FedAvg (FO)": Arm("per_fedavg", {"local_steps": 1}, inner),
        "MetaGater, 1 local step": Arm("metagater", {**gater, "local_steps": 1}, proximal),
        "MetaGater, 2 local steps": Arm("metagater", {**gater, "local_steps": 2}, proximal),
        "MetaGater, up to 5 steps, xi = 0.01": Arm(
            "metagater", {**gater, "local_steps": 5, "local_accuracy": 0.01}, proximal
        ),
    }


def build_brain_arms() -> dict[str, Arm]:
    """Return the arms on scan sites. The network is an MLP without channels, so no arm has gates."""
    plain = {"optimizer": "sgd", "batch_size": 32, "clip_norm": 1.0}
    rates = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
    by_rate = {f"lr {rate:g}": {"training": {**plain, "lr": rate}} for rate in rates}
    pairs = [(0.1, 0.05), (0.2, 0.02), (0.2, 0.05), (0.2, 0.1), (0.4, 0.05), (0.4, 0.1), (0.8, 0.05)]
    inner = {f"lr {lr:g}, alpha {alpha:g}": {**by_rate[f"lr {lr:g}"], "adapt_lr": alpha} for lr, alpha in pairs}
    proximal = {f"lr {rate:g}": {"training": {**plain, "lr": rate / LAMBDA}} for rate in rates}
    few = {"local_steps": 2}
    return {
        "FedAvg + one step": Arm("fedavg_one_step", few, by_rate),
        "FedAvg, an epoch a round, + one step": Arm("fedavg_one_step", {"local_steps": None}, by_rate),
        "Per-FedAvg (FO)": Arm("per_fedavg", few, inner),
        "MetaGater without gates": Arm("metagater", {**few, "momentum_cap": 0.9}, proximal),
    }


CIFAR = {"image": (3, 32, 32), "classes": 10, "model": {"name": "image_cnn", "channels": [32, 64, 128]}}
BRAIN = {
    "kind": "regression",
    "target": "age",
    "target_scale": (45, 15),
    "unit": "years",
    "features": ["destrieux"],
    "id": "subject",
    "scaling": "freesurfer",
}
SETTINGS = {
    "cifar_small": Setting(
        "image_classification",
        CIFAR,
        ("2",),
        build_cifar_arms(1000, (0.01, 0.03, 0.1)),
        {"sites": 20, "targets": 10, "min_examples": 30, "max_examples": 100},
    ),
    "cifar_main": Setting(
        "image_classification",
        CIFAR,
        ("2",),
        # The inner step that validation on the small sites chose for every seed: a second one takes two runs of FedAvg.
        build_cifar_arms(64, (0.01,)),
        {"sites": 40, "targets": 10, "min_examples": 221, "max_examples": 2792},
        validation_sites=10,
    ),
    "cifar_moderate": Setting(
        "image_classification",
        {**CIFAR, "model": {"name": "image_cnn6"}},
        ("4", "5"),
        build_cifar_arms(64, (0.01,), ("4.0.conv", "5.0.conv")),
        {"sites": 20, "targets": 10, "min_examples": 221, "max_examples": 2792},
        validation_sites=10,
    ),
    "mnist": Setting(
        "image_classification",
        {"image": (1, 28, 28), "classes": 10, "model": {"name": "image_mlp", "hidden": [100]}},
        (),
        build_mnist_arms(),
        {"sites": 20, "targets": 5, "min_examples": 116, "max_examples": 383},
        file="mnist/mnist_small.npz",
        participation=0.25,
    ),
    "brain": Setting("table", BRAIN, (), build_brain_arms(), {"targets": 10, "smallest_target": 20}),
}


EXTRA_TESTS = 200


def load_sites(setting: Setting, task: Task, data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return the examples of all sites, and the names of the target sites.

    Args:
        setting: numbers of sites, of targets and of their examples.
        task: loads the examples.
        data: folder with cifar10/, mnist/ and brain_morphometry/.
        seed: seed of the partition, of the targets and of the split at each site.
    """
    sizes = dict(setting.sites)
    if "smallest_target" in sizes:
        return load_brain_sites(task, sizes, data, seed)
    return load_image_sites(task, sizes, data / setting.file, seed)


def load_image_sites(task: Task, sizes: dict[str, int], path: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return sites of two classes each, and the names of the target sites.

    A site tests on 20 % of its own images. A target tests on up to ``EXTRA_TESTS`` images of its classes that no site
    holds as well, because the test images of a target of 30 are too few.
    """
    targets = sizes.pop("targets")
    cohort = task.cohort(path)
    parts = FewClassesPartition(**sizes, seed=seed).divide(cohort, sizes.pop("sites") + targets)
    chosen = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()[:targets]
    held_out = sorted(sorted(parts)[i] for i in chosen)
    label = dict(zip(cohort.ids, cohort.columns["label"].tolist(), strict=True))
    taken = {name for ids in parts.values() for name in ids}
    examples = {name: task.load(SiteData(name, path, ids), seed) for name, ids in parts.items()}
    for name in held_out:
        own, classes = examples[name], {label[i] for i in parts[name]}
        free = [i for i in cohort.ids if label[i] in classes and i not in taken]
        picked = torch.randperm(len(free), generator=torch.Generator().manual_seed(seed)).tolist()[:EXTRA_TESTS]
        more = task.load(SiteData(name, path, tuple(free[i] for i in picked)), seed) if picked else None
        tests = [own.test, *([more.train, more.test] if more else [])]
        examples[name] = Examples(own.train, ConcatDataset(tests))
    return examples, held_out


def load_brain_sites(task: Task, sizes: dict[str, int], data: Path, seed: int) -> tuple[dict[str, Examples], list[str]]:
    """Return the 49 scan sites of three cohorts; some of those with many subjects are targets."""
    folder = data / "brain_morphometry"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "destrieux.npz"
        join_tables(sorted(folder.glob("destrieux_*.csv.gz")), path)
        parts = NaturalPartition().divide(task.cohort(path))
        examples = {name: task.load(SiteData(name, path, ids), seed) for name, ids in parts.items()}
    large = [name for name, ids in sorted(parts.items()) if len(ids) >= sizes["smallest_target"]]
    drawn = torch.randperm(len(large), generator=torch.Generator().manual_seed(seed))[: sizes["targets"]]
    return examples, sorted(large[i] for i in drawn.tolist())


def join_tables(files: list[Path], path: Path) -> None:
    """Write the rows of all tables in their common columns; subjects and sites get their cohort as prefix."""
    tables = {file.name.removesuffix(".csv.gz").removeprefix("destrieux_"): read_table(file).columns for file in files}
    shared = set.intersection(*(set(columns) for columns in tables.values()))
    out = {name: np.concatenate([columns[name] for columns in tables.values()]) for name in sorted(shared)}
    for name in ("subject", "site"):
        texts = [[f"{cohort}-{value}" for value in columns[name]] for cohort, columns in tables.items()]
        out[name] = np.array([text for part in texts for text in part])
    np.savez(path, **out)


def build_task(setting: Setting, *, gated: bool) -> Task:
    settings = dict(setting.task_settings)
    if gated:
        settings["model"] = {**settings["model"], "gates": {"layers": list(setting.layers), "open_bias": OPEN_BIAS}}
    return TASKS[setting.task](settings)


@dataclass(frozen=True)
class Sites:
    """The sites of a run.

    Attributes:
        training: sites that train. They have no test examples: a site with some evaluates the model of every round.
        validation: these sites, or some of them, with their held-out examples, which choose the steps.
        targets: sites that take no part in training, and choose nothing.
    """

    training: dict[str, Site]
    validation: dict[str, Site]
    targets: dict[str, Site]


def build_sites(setting: Setting, task: Task, layout: Layout, data: Path, seed: int) -> Sites:
    examples, targets = load_sites(setting, task, data, seed)
    sites = {name: build_site(LocalTask.open(name, task, own, layout, seed)) for name, own in examples.items()}
    others = [name for name in sites if name not in targets]
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed)).tolist()
    judges = sorted(others[i] for i in order[: setting.validation_sites])
    return Sites(
        {
            name: build_site(LocalTask.open(name, task, Examples(examples[name].train, EMPTY), layout, seed))
            for name in others
        },
        {name: sites[name] for name in judges if examples[name].n_test},
        {name: sites[name] for name in targets},
    )


@dataclass(frozen=True)
class Candidate:
    """A model trained with one of an arm's steps.

    Attributes:
        method: the method's name.
        settings: its settings.
        layout: layout of the model.
        weights: ``(P,)``.
        live: the entries that a target receives.
        seed: seed of the run.
        figures: seconds and bytes of the training.
    """

    method: str
    settings: dict[str, Any]
    layout: Layout
    weights: Tensor
    live: Mask
    seed: int
    figures: dict[str, float]

    def build_method(self, adapt_lr: float) -> Any:
        return build_method(self.method, {**self.settings, "adapt_lr": adapt_lr}, self.layout, self.seed)

    def adapt(self, sites: Mapping[str, Site]) -> dict[str, dict[str, float]]:
        """Return the metrics of the final request at some sites, for each step of adaptation."""
        return {str(rate): evaluate_adapted(self.build_method(rate), self, sites) for rate in ADAPT_RATES}


def build_method(name: str, settings: Mapping[str, Any], layout: Layout, seed: int) -> Any:
    return METHODS[name](METHODS[name].Config.model_validate(settings), layout, seed)


def run(
    setting: Setting, label: str, data: Path, rounds: int, seed: int, out: Path, curve: Sequence[int] = ()
) -> dict[str, Any]:
    """Train with each step of an arm, choose steps by validation, adapt at the targets; write the model to ``out``."""
    arm = setting.arms[label]
    task = build_task(setting, gated=arm.gated)
    layout, weights = build_initial_model(task, seed)
    sites = build_sites(setting, task, layout, data, seed)
    candidates, validation = {}, {}
    for name, step in arm.steps.items():
        settings = {"rounds": rounds, "participation": setting.participation, **arm.settings, **step}
        if arm.method == "metasnip":
            settings["sparsity"] = read_sparsity(out, seed)
            final = read_model(out / f"MetaGater without gates-{seed}.safetensors", layout)
            candidates[name] = Candidate(arm.method, settings, layout, final, Mask.full(layout.size), seed, {})
        else:
            candidates[name] = train(arm.method, settings, layout, weights, sites.training, task.metric, seed)
        validation[name] = candidates[name].adapt(sites.validation)
    step, rate = choose_steps(validation, task.metric)
    chosen = candidates[step]
    save_model(out / f"{label}-{seed}.safetensors", layout, chosen.weights)
    points = {}
    for fewer in curve:
        settings = {**chosen.settings, "rounds": fewer}
        model = train(arm.method, settings, layout, weights, sites.training, task.metric, seed)
        points[fewer] = evaluate_adapted(model.build_method(rate), model, sites.targets)[task.metric.name]
    return {
        "curve": points,
        "label": label,
        "seed": seed,
        "rounds": rounds,
        "metric": task.metric.name,
        "arm": asdict(arm),
        "chosen": {"step": step, "adapt_lr": rate},
        "validation": validation,
        "targets": chosen.adapt(sites.targets),
        "test_examples": sum(site.trainer.num_test_examples for site in sites.targets.values()),
        "validation_examples": sum(site.trainer.num_test_examples for site in sites.validation.values()),
        **chosen.figures,
        **time_adaptation(chosen.build_method(rate), chosen, sites.targets),
    }


def train(
    name: str,
    settings: dict[str, Any],
    layout: Layout,
    weights: Tensor,
    sites: Mapping[str, Site],
    metric: Metric,
    seed: int,
) -> Candidate:
    """Run all rounds; the adaptation at the end of the run has no test examples and is not used."""
    outcome, ledger = run_locally(build_method(name, settings, layout, seed), weights, sites, metric)
    lines = [line for line in ledger.lines if line.kind == "train"]
    figures = {
        "training_s": sum(record.seconds for record in outcome.rounds if record.kind == "train"),
        "bytes": sum(line.payload_bytes for line in lines),
        "dense_bytes": sum(line.dense_bytes for line in lines),
    }
    return Candidate(name, settings, layout, outcome.weights, outcome.mask, seed, figures)


def choose_steps(validation: Mapping[str, Mapping[str, Mapping[str, float]]], metric: Metric) -> tuple[str, float]:
    """Return the step of training and the step of adaptation with the best metric on the validation examples."""
    figures = {(step, float(rate)): m[metric.name] for step, rates in validation.items() for rate, m in rates.items()}
    best = max if metric.mode == "max" else min
    return best(figures, key=lambda key: figures[key])


def read_sparsity(out: Path, seed: int) -> float:
    """Return the share of channels that MetaGater with gates closes at the validation examples, with its steps."""
    gated = json.loads((out / f"MetaGater with gates-{seed}.json").read_text())
    step, rate = gated["chosen"]["step"], str(gated["chosen"]["adapt_lr"])
    return min(max(gated["validation"][step][rate]["channel_sparsity"], 0.01), 0.99)


def evaluate_adapted(method: Any, model: Candidate, sites: Mapping[str, Site]) -> dict[str, float]:
    """Return the metrics of the method's final request, without the rounds before it."""
    updates = []
    for name, site in sites.items():
        site.weights = model.weights.clone()
        request = Request(ADAPT, 1, Patch.from_vector(model.weights, model.live), model.live)
        update = method.answer(request, site)
        updates.append(Contribution(name, update.patch, update.content, update.num_examples, update.metrics))
    return Evaluation.from_contributions(updates).overall


def time_adaptation(method: Any, model: Candidate, sites: Mapping[str, Site]) -> dict[str, float]:
    """Return this thread's seconds of adaptation and of inference at all sites: the fastest of three."""
    adapting, inferring = [], []
    for _ in range(3):
        began, own = time.thread_time(), {}
        for name, site in sites.items():
            site.weights = model.weights.clone()
            own[name] = method.adapt(site, model.live)
        adapting.append(time.thread_time() - began)
        began = time.thread_time()
        for name, site in sites.items():
            site.evaluate(own[name])
        inferring.append(time.thread_time() - began)
    return {"adapt_s": min(adapting), "infer_s": min(inferring)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("data", type=Path, help="folder with cifar10/, mnist/ and brain_morphometry/")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="labels of the arms; default: all")
    parser.add_argument("--curve", action="store_true", help="also after a twentieth, an eighth, a quarter and a half")
    parser.add_argument("--out", type=Path, default=Path("runs/metagater"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting, out = SETTINGS[arguments.setting], arguments.out / arguments.setting
    out.mkdir(parents=True, exist_ok=True)
    curve = [arguments.rounds // part for part in (20, 8, 4, 2)] if arguments.curve else []
    for seed in arguments.seeds:
        for label in setting.arms:
            if arguments.arms and label not in arguments.arms:
                continue
            file = out / f"{label}-{seed}.json"
            with claim(file) as is_claimed:
                if not is_claimed:
                    continue
                began = time.monotonic()
                result = run(setting, label, arguments.data, arguments.rounds, seed, out, curve)
                write_json(file, result)
            chosen, metric = result["chosen"], result["metric"]
            figure = result["targets"][str(chosen["adapt_lr"])][metric]
            print(seed, label, chosen, f"{metric} {figure:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
