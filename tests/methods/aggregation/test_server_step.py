"""Server step and average over rounds, against numbers computed by hand (docs/algorithms.md, section 1.13)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from flare_sparse.core.exchange import Contribution, Patch
from flare_sparse.core.mask import Mask
from flare_sparse.methods.aggregation.server_step import (
    ModelAverage,
    ServerMemory,
    ServerOptimizer,
    take_server_step,
    update_model_average,
)
from flare_sparse.methods.aggregation.weighted import weigh_by_examples, weighted_sum

LIVE = Mask(torch.tensor([True, True, False, True]))
START = torch.tensor([1.0, 2.0, 0.0, 4.0])
"""Two live parameters, one that is off, and a running statistic."""


def build_contributions(weights: torch.Tensor) -> list[Contribution]:
    """Return updates with a mean delta of 0.5, -0.25 and, of the statistic, 1."""
    deltas = {"a": [1.0, 0.0, 2.0], "b": [0.0, -0.5, 0.0]}
    return [
        Contribution(site, Patch(LIVE.take(weights) + torch.tensor(delta), LIVE), "weights", 7)
        for site, delta in deltas.items()
    ]


def step(weights: torch.Tensor, memory: ServerMemory, **settings: Any) -> tuple[torch.Tensor, ServerMemory]:
    optimizer = ServerOptimizer.model_validate(settings)
    return take_server_step(build_contributions(weights), weights, memory, optimizer, 3)


def test_plain_average_is_the_weighted_sum_and_remembers_nothing() -> None:
    weights, memory = step(START, ServerMemory())
    assert torch.equal(weights, weighted_sum(build_contributions(START), weigh_by_examples))
    assert memory == ServerMemory()


def test_step_size_scales_the_mean_delta_of_parameters_alone() -> None:
    weights, memory = step(START, ServerMemory(), lr=2.0)
    assert weights.tolist() == [2.0, 1.5, 0.0, 5.0]
    assert memory == ServerMemory()


def test_momentum_adds_the_decayed_mean_of_earlier_deltas() -> None:
    weights, memory = step(START, ServerMemory(), optimizer="momentum", lr=2.0, beta1=0.5)
    assert weights.tolist() == [2.0, 1.5, 0.0, 5.0]
    # m = 0.5 * (0.5, -0.25) + (0.5, -0.25).
    weights, memory = step(weights, memory, optimizer="momentum", lr=2.0, beta1=0.5)
    assert weights.tolist() == [3.5, 0.75, 0.0, 6.0]
    assert memory.momentum is not None
    assert memory.momentum.tolist()[:3] == [0.75, -0.375, 0.0]
    assert memory.variance is None


ADAPTIVE = {"beta1": 0.5, "beta2": 0.75, "tau": 0.5, "lr": 3.0}


def test_adam_divides_by_the_root_of_the_mean_square() -> None:
    weights, memory = step(START, ServerMemory(), optimizer="adam", **ADAPTIVE)
    # m = (0.25, -0.125); v = 0.75 * 0.25 + 0.25 * (0.25, 0.0625), from v = tau^2.
    v = [0.25, 0.203125]
    first = [1 + 3 * 0.25 / (0.5 + 0.5), 2 - 3 * 0.125 / (math.sqrt(v[1]) + 0.5)]
    assert weights.tolist() == pytest.approx([*first, 0.0, 5.0])
    weights, memory = step(weights, memory, optimizer="adam", **ADAPTIVE)
    v = [0.75 * v[0] + 0.0625, 0.75 * v[1] + 0.015625]
    m = [0.375, -0.1875]
    second = [x + 3 * a / (math.sqrt(b) + 0.5) for x, a, b in zip(first, m, v, strict=True)]
    assert weights.tolist() == pytest.approx([*second, 0.0, 6.0])
    assert memory.variance is not None
    assert memory.variance.tolist()[:3] == pytest.approx([*v, 0.0])


def test_yogi_moves_the_mean_square_by_the_square_of_the_delta() -> None:
    weights, memory = step(START, ServerMemory(), optimizer="yogi", **ADAPTIVE)
    # v - 0.25 * delta^2 * sign(v - delta^2): the first delta's square is v itself, so that its sign is 0.
    v = [0.25, 0.25 - 0.25 * 0.0625]
    expected = [1 + 3 * 0.25 / (0.5 + 0.5), 2 - 3 * 0.125 / (math.sqrt(v[1]) + 0.5)]
    assert weights.tolist() == pytest.approx([*expected, 0.0, 5.0])
    assert memory.variance is not None
    assert memory.variance.tolist()[:3] == pytest.approx([*v, 0.0])


@pytest.mark.parametrize("optimizer", ["momentum", "adam", "yogi"])
def test_entry_that_is_pruned_loses_its_moments_and_does_not_move(optimizer: str) -> None:
    full = Mask.full(4)
    everywhere = [Contribution("a", Patch(START + 1, full), "weights", 1)]
    settings = ServerOptimizer.model_validate({"optimizer": optimizer, "lr": 0.1})
    _, memory = take_server_step(everywhere, START, ServerMemory(), settings, 4)
    weights, memory = take_server_step(build_contributions(START), START, memory, settings, 4)
    assert weights[2] == 0
    for moment in (memory.momentum, memory.variance):
        assert moment is None or moment[2] == 0


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_delta_that_would_freeze_an_entry_for_good_is_refused(optimizer: str) -> None:
    huge = [Contribution("a", Patch(torch.tensor([1e25, 0.0, 0.0]), LIVE), "weights", 1)]
    settings = ServerOptimizer.model_validate({"optimizer": optimizer, "lr": 0.1})
    with pytest.raises(OverflowError, match="exceed float32"):
        take_server_step(huge, START, ServerMemory(), settings, 3)


def test_average_of_models_at_the_ends_of_float32_is_refused() -> None:
    models = [torch.tensor([-3e38, 0.0]), torch.tensor([3e38, 0.0])]
    with pytest.raises(OverflowError, match="exceed float32"):
        average(models, [Mask.full(2)] * 2, kind="swa", start=0.0)


def test_adaptive_step_without_a_size_is_refused() -> None:
    with pytest.raises(ValidationError, match="lr is missing: adam moves an entry by about lr a round"):
        ServerOptimizer.model_validate({"optimizer": "adam"})


def average(models: list[torch.Tensor], masks: list[Mask], **settings: Any) -> list[torch.Tensor | None]:
    """Return the average after each round of a run."""
    memory, results, rule = ServerMemory(), [], ModelAverage.model_validate(settings)
    for t, (model, live) in enumerate(zip(models, masks, strict=True), start=1):
        memory = update_model_average(memory, model, live, rule, t, len(models))
        results.append(memory.average)
    return results


MODELS = [torch.tensor([8.0, 8.0]), torch.tensor([4.0, 4.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.0])]


def to_list(vector: torch.Tensor | None) -> list[float] | None:
    return None if vector is None else vector.tolist()


def test_models_of_the_last_rounds_are_averaged_with_equal_weights() -> None:
    results = average(MODELS, [Mask.full(2)] * 4, kind="swa", start=0.5)
    assert list(map(to_list, results)) == [None, None, [2.0, 2.0], [1.5, 1.0]]


def test_moving_average_decays_and_starts_at_the_first_model() -> None:
    results = average(MODELS, [Mask.full(2)] * 4, kind="ema", decay=0.5, start=0.0)
    assert list(map(to_list, results)) == [[8.0, 8.0], [6.0, 6.0], [4.0, 4.0], [2.5, 2.0]]


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_entry_that_is_off_in_the_last_round_is_off_in_the_average(kind: str) -> None:
    masks = [Mask.full(2)] * 3 + [Mask(torch.tensor([True, False]))]
    result = average(MODELS, masks, kind=kind, start=0.0)[3]
    assert result is not None
    assert result[0] > 0
    assert result[1] == 0


def test_nothing_is_averaged_by_default() -> None:
    assert average(MODELS, [Mask.full(2)] * 4) == [None] * 4
