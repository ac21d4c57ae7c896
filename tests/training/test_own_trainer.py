"""A trainer of one's own takes one class; methods, messages, rounds and wrappers are those of the package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from toy import Plain, ToyBench

from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.tasks.task import Metric
from flare_sparse.training import Site, Trainer, Training
from flare_sparse.training.private import SilentTrainer


class ConstantTrainer(Trainer):
    """Adds a half to every trainable entry."""

    num_examples = 4

    def train(self, training: Training) -> Tensor:
        return training.trainable.take(training.start) + 0.5

    def evaluate(self, weights: Tensor, memory: Mapping[str, Tensor]) -> dict[str, float]:
        return {"mean": float(weights.mean())}


BENCH = ToyBench(Plain())


def run(name: str, trainers: list[Any], **settings: Any) -> Any:
    def fail(site: str, error: Exception) -> None:
        raise error

    sites = {f"site-{i}": Site(f"site-{i}", trainer) for i, trainer in enumerate(trainers, start=1)}
    method, metric = BENCH.method(name, rounds=2, **settings), Metric("mean", "", "max")
    return run_locally(method, BENCH.weights, sites, metric, course=Course(on_site_error=fail))[0]


def test_federated_rounds_run_with_it() -> None:
    outcome = run("fedavg", [ConstantTrainer(BENCH.layout), SilentTrainer(ConstantTrainer(BENCH.layout))])
    assert torch.equal(outcome.weights, BENCH.weights + 0.5 + 0.5)
    assert [bool(metrics) for metrics in outcome.evaluation.sites.values()] == [True, False]
    assert outcome.evaluation.overall["mean"] == pytest.approx(float(BENCH.weights.mean()) + 1)


def test_pruned_entries_stay_zero() -> None:
    outcome = run("neurosfl", [ConstantTrainer(BENCH.layout)], scores="random", random_layers="erk", sparsity=0.5)
    live = outcome.mask.bits
    assert torch.equal(outcome.weights[live], BENCH.weights[live] + 0.5 + 0.5)
    assert not outcome.weights[~live].any()


def test_what_it_leaves_out_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="the method needs gradients at each site, which ConstantTrainer does not"):
        run("neurosfl", [ConstantTrainer(BENCH.layout)], sparsity=0.5)
    with pytest.raises(ConfigError, match="needs smaller networks at each site"):
        Site("site-1", ConstantTrainer(BENCH.layout)).narrow(Mask.empty(BENCH.layout.size))
