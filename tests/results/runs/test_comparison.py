"""What ``report --json`` says of each predictor: every metric that a difference compares, over all and by site."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flare_sparse.results.runs.comparison import ExampleTests
from flare_sparse.results.runs.predictions import RUN, Predictions
from flare_sparse.results.runs.results import RunResult
from flare_sparse.tasks.task import Kind

SITES = np.array(["a"] * 30 + ["b"] * 20 + ["c"] * 3)


def predict(kind: Kind) -> ExampleTests:
    """Return a run and its baselines, of which the local one is another model at each site."""
    generator = np.random.default_rng(4)
    event = generator.integers(2, size=(len(SITES), 1)).astype(float)
    targets = np.hstack([generator.exponential(size=(len(SITES), 1)), event]) if kind == "survival" else event
    values = {name: generator.random((len(SITES), 1)) for name in (RUN, "local", "pooled")}
    digests = dict.fromkeys("abc", "x")
    predictions = Predictions("run", kind, SITES, np.full(len(SITES), -1), targets, values, digests, ("local",))
    run = RunResult("run", Path("run"), {"seed": 1}, [], [])
    run.__dict__.update(config={}, predictions=predictions)
    tests = ExampleTests.collect([run])
    assert tests is not None
    return tests


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("binary", {"local": {"accuracy", "auc_across_sites"}, "pooled": {"accuracy", "auc_across_sites"}}),
        ("survival", {"local": {"c_index_within_sites"}, "pooled": {"c_index_across_sites"}}),
    ],
)
def test_predictors_have_the_metrics_of_their_differences(kind: Kind, expected: dict[str, set[str]]) -> None:
    tests = predict(kind)
    found = tests.compare({name: (tests, name) for name in expected})["differences"]
    for name, metrics in expected.items():
        differences, described = found[name], tests.describe(name)
        assert differences.keys() == metrics
        for metric, difference in differences.items():
            assert described[metric] == pytest.approx(difference["second"])
            assert described[f"{metric}_by_site"].keys() == {"a", "b", "c"}
    assert {"binary": "auc_across_sites", "survival": "c_index_across_sites"}[kind] in tests.describe(RUN)


def test_site_with_too_few_subjects_has_no_metric_within_sites() -> None:
    by_site = predict("survival").describe("local")["c_index_within_sites_by_site"]
    assert by_site["c"] is None
    assert 0 <= by_site["a"] <= 1
