"""Adaptation of MetaGater and its baselines to target sites: CIFAR-10 with two classes per site, and brain age.

    python benchmarks/experiments/metagater.py cifar_small ../shared/data --rounds 120 --seeds 1 2 3
    python benchmarks/experiments/metagater.py cifar_main ../shared/data --rounds 200 --seeds 1 2 3
    python benchmarks/experiments/metagater.py brain ../shared/data --rounds 100 --seeds 1 2 3

Target sites take no part in training. Every site keeps 20 % of its examples for validation or testing: those of the
training sites choose the steps of each arm and seed, those of the targets choose nothing. The step of adaptation, and
the step of training where an arm lists several, are those whose model is best on the validation examples after one step
on the training examples of each training site; in ``cifar_main`` of ten of them, drawn by the seed.

Each run is one process without FLARE, ends with the same bits as a FLARE job, and writes one JSON file to ``--out``:
finished runs are not repeated, several processes may share the work. ``metagater_report.py`` turns the files into
docs/results/texts.md and its plot. MetaSNIP runs last: it needs the backbone of MetaGater without gates and the
sparsity of MetaGater with gates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from metagater_arms import SETTINGS, Setting
from metagater_sites import load_sites
from runs import claim
from torch import Tensor
from torch.utils.data import TensorDataset

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.checkpoint.writing import write_json
from flare_sparse.core.exchange import Contribution, Patch, Request
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.methods.registry import METHODS
from flare_sparse.methods.support.adaptation import ADAPT
from flare_sparse.results.runs.model_files import read_model, save_model
from flare_sparse.rounds.federation import Evaluation
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import Examples, Metric, Task
from flare_sparse.training import LocalTask, Site, build_site

EMPTY = TensorDataset(torch.zeros(0))
ADAPT_RATES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
OPEN_BIAS = 0.1
PARTICIPATION = 0.5


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
    examples, targets = load_sites(task, setting.sites, data, seed)
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


def run(setting: Setting, label: str, data: Path, rounds: int, seed: int, out: Path) -> dict[str, Any]:
    """Train with each step of an arm, choose steps by validation, adapt at the targets; write the model to ``out``."""
    arm = setting.arms[label]
    task = build_task(setting, gated=arm.gated)
    layout, weights = build_initial_model(task, seed)
    sites = build_sites(setting, task, layout, data, seed)
    candidates, validation = {}, {}
    for name, step in arm.steps.items():
        settings = {"rounds": rounds, "participation": PARTICIPATION, **arm.settings, **step}
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
    return {
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
        updates.append(Contribution.from_update(name, method.answer(request, site)))
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
    parser.add_argument("data", type=Path, help="folder with cifar10/ and brain_morphometry/")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", help="labels of the arms; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/metagater"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting, out = SETTINGS[arguments.setting], arguments.out / arguments.setting
    out.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for label in setting.arms:
            if arguments.arms and label not in arguments.arms:
                continue
            file = out / f"{label}-{seed}.json"
            with claim(file) as is_claimed:
                if not is_claimed:
                    continue
                began = time.monotonic()
                result = run(setting, label, arguments.data, arguments.rounds, seed, out)
                write_json(file, result)
            chosen, metric = result["chosen"], result["metric"]
            figure = result["targets"][str(chosen["adapt_lr"])][metric]
            print(seed, label, chosen, f"{metric} {figure:.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
