"""The settings of a sweep, and their order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.config.loading import keep_known_settings
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.runs.sweep import (
    SettingsResult,
    Trial,
    expand_grid,
    find_best_of_methods,
    find_unequal_validation,
    rank_settings,
)


def summarize(value: float | None, mode: str = "min", examples: float = 5.0) -> dict[str, Any]:
    """Return a summary whose test metric contradicts its validation metric."""
    metrics = {"mae": 100.0 - (value or 0)} | (
        {} if value is None else {"validation_mae": value, "validation_examples": examples}
    )
    return {
        "metric": {"name": "mae", "mode": mode},
        "final": {"metrics": metrics},
        "traffic": {"up": {"payload_bytes": 10}, "down": {"payload_bytes": 20}},
    }


def test_every_combination_runs_with_every_seed() -> None:
    models = "task.model={name: mlp, hidden: [4, 2]},{name: mlp}"
    settings = expand_grid(["method.sparsity=0.8, 0.9", models])
    trials = [Trial(own, seed) for own in settings for seed in range(3, 5)]
    assert [(trial.settings, trial.seed) for trial in trials[:2]] == [
        (("method.sparsity=0.8", "task.model={name: mlp, hidden: [4, 2]}"), seed) for seed in (3, 4)
    ]
    assert len(trials) == len({trial.folder for trial in trials}) == 8
    assert trials[0].folder.startswith("sparsity=0.8_model=")
    assert all(set(trial.folder) <= set("abcdefghijklmnopqrstuvwxyz0123456789=._-") for trial in trials)


def test_settings_that_do_not_apply_make_no_further_combination() -> None:
    grid = ["method.name=fedavg,neurosfl", "method.sparsity=0.8,0.9"]
    assert expand_grid(grid, partial(keep_known_settings, folder=Path())) == [
        ("method.name=fedavg",),
        ("method.name=neurosfl", "method.sparsity=0.8"),
        ("method.name=neurosfl", "method.sparsity=0.9"),
    ]


@pytest.mark.parametrize(
    "grid",
    [
        ["method.sparsity"], ["=1"], ["a=1,,2"], ["a=1", "a=2"], ["seed=1,2"], ["task.split.fold=1,2"],
        ["task.split={test: 0.1},{test: 0.2}"],
    ],
)  # fmt: skip
def test_unusable_grid_is_refused(grid: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"expected KEY|use --seeds|for all|named twice"):
        expand_grid(grid)


@pytest.mark.parametrize(("mode", "order"), [("min", ["a", "b"]), ("max", ["b", "a"])])
def test_settings_are_ranked_by_their_mean_on_validation_examples(mode: str, order: list[str]) -> None:
    results = {
        Trial((name,), seed): summarize(value, mode)
        for name, values in {"b": (1.0, 5.0), "a": (2.0, 3.0)}.items()
        for seed, value in enumerate(values)
    }
    ranked = rank_settings(results, {})
    assert [result.settings[0] for result in ranked] == order
    best = next(result for result in ranked if result.settings == ("a",))
    assert (best.mean, best.bytes, best.validation) == (2.5, 30, {0: 2.0, 1: 3.0})
    assert best.deviation == pytest.approx(0.5**0.5)


def test_settings_with_a_run_without_validation_metric_come_last() -> None:
    results = {Trial(("a",), 1): summarize(1.0), Trial(("a",), 2): summarize(None), Trial(("b",), 1): summarize(2.0)}
    ranked = rank_settings(results | {Trial(("b",), 2): summarize(3.0)}, {})
    assert [(result.settings, result.validation) for result in ranked] == [
        (("b",), {1: 2.0, 2: 3.0}),
        (("a",), {1: 1.0}),
    ]
    reason = "no site reported mae on validation examples; raise task.split.validation for all runs by --set"
    assert ranked[1].failed == {2: reason}
    with pytest.raises(ConfigError, match="in all finished runs, no site reported mae on validation examples"):
        rank_settings({Trial(("a",), 2): summarize(None)}, {Trial(("a",), 1): "E_DATA"})


@pytest.mark.parametrize("mode", ["min", "max"])
def test_settings_with_a_failed_run_come_last(mode: str) -> None:
    results = {Trial((name,), 1): summarize(value, mode) for name, value in {"a": 1.0, "b": 2.0, "c": 3.0}.items()}
    failures = {Trial(("none",), 1): "E_DATA", Trial(("a",), 2): "E_QUORUM", Trial(("c",), 2): "E_QUORUM"}
    ranked = rank_settings(results, failures)
    order = ["a", "c"] if mode == "min" else ["c", "a"]
    assert [result.settings[0] for result in ranked] == ["b", *order, "none"]
    assert [result.failed for result in ranked] == [{}, {2: "E_QUORUM"}, {2: "E_QUORUM"}, {1: "E_DATA"}]
    assert (ranked[-1].mean, ranked[-1].bytes, ranked[-1].deviation) == (None, None, None)


def test_label_of_a_trial_names_settings_and_seed() -> None:
    assert Trial(("method.training.lr=1e20", "method.rounds=5"), 1).label == "lr=1e20, rounds=5, seed 1"


def test_settings_that_choose_other_validation_examples_are_not_comparable() -> None:
    results = {Trial(("a",), 1): summarize(1.0), Trial(("b",), 1): summarize(2.0)}
    assert find_unequal_validation(rank_settings(results, {})) == ""
    results[Trial(("c",), 1)] = summarize(3.0, examples=4.0)
    warning = find_unequal_validation(rank_settings(results, {}))
    assert "cannot be compared" in warning
    assert "(seed 1: 4 with c; 5 with a)" in warning


def test_each_method_has_its_best_settings_with_every_seed() -> None:
    results = [
        SettingsResult((f"method.name={name}", f"a={a}"), values, failures, {}, 1.0)
        for name, a, values, failures in (
            ("y", 1, {0: 1.0}, {1: "E_DATA"}), ("x", 1, {0: 2.0, 1: 2.0}, {}), ("y", 2, {0: 3.0, 1: 3.0}, {}),
            ("x", 2, {0: 4.0, 1: 4.0}, {}),
        )
    ]  # fmt: skip
    best = find_best_of_methods(results)
    assert {name: result.settings[1] for name, result in best.items()} == {"x": "a=1", "y": "a=2"}
