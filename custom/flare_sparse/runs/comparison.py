"""Comparison of runs with their baselines and with one another, as plain data: ``flare-sparse report --json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..task import TEST_EXAMPLES, VALIDATION, Kind
from .bootstrap import METRICS, PairedMetric, compare_predictors, compare_scores, compute_r2_within_sites
from .predictions import RUN, Predictions
from .results import RunResult, group_by_seed, label_groups

SIZES = (20, 50, 100, 200)
"""Limits of the groups of sites by number of test and other examples."""
DEFINITIONS = {
    "final.all": "mean of the sites' values, weighted by test examples; the value over all examples for means over "
    "examples, such as MAE and accuracy, and a mean of values within sites for AUC, C-index, R2 and F1",
    "pooled": "over the test subjects of all sites at once; needs their predictions on this machine",
    "differences": "first minus second on the same test subjects, with a 95 % bootstrap interval over 10,000 resamples "
    "of the subjects within their site; ahead and behind: the interval excludes 0",
    "notes": "sites that a comparison of groups leaves out, because identifiers or targets are not the same in both",
}
Key = tuple[str, str, str, int]
"""Site, digest of its identifiers, subject, and number of the example among those of the subject."""
TARGET_TOLERANCE = 1e-5
"""Largest relative difference of one subject's target in two runs: their tasks may scale it in single precision."""


def describe_runs(runs: Sequence[RunResult], notes: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of runs, of their baselines, and of the differences between them.

    Args:
        runs: the runs, which share one metric.
        notes: by label, why a run has no predictions.
    """
    return {
        "definitions": DEFINITIONS,
        "runs": [_describe_run(run, notes.get(run.label, "")) for run in runs],
        "groups": describe_groups(runs),
    }


def describe_groups(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return the figures of runs that differ by seed and fold only, and their differences from the other groups."""
    groups = group_by_seed(list(runs))
    labels = label_groups(groups)
    return [_describe_group(label, group, groups, labels) for label, group in zip(labels, groups, strict=True)]


def _describe_run(run: RunResult, note: str) -> dict[str, Any]:
    summary, predictions = run.summary, run.predictions
    description = {
        "label": run.label,
        "folder": str(run.path),
        "method": summary["method"],
        "seed": summary["seed"],
        "fold": run.fold,
        "rounds": summary["rounds"],
        "stopped_after": summary.get("stopped_after"),
        "metric": summary["metric"],
        "final": {
            "all": _select_tests(summary["final"]["metrics"]),
            "by_site": {site: _select_tests(metrics) for site, metrics in sorted(summary["final"]["sites"].items())},
            "by_test_examples": _describe_sizes(run),
        },
        "worst_site": list(run.worst_site) if run.worst_site else None,
        "best": summary["best"],
        "bytes": {direction: sums["payload_bytes"] for direction, sums in summary["traffic"].items()},
        "pooled": None,
        "baselines": None,
        "differences": None,
        "note": note or (predictions.note if predictions else ""),
    }
    if predictions is not None:
        description["pooled"] = predictions.pooled | _describe_predictor(predictions, RUN)
        description["baselines"] = {name: _describe_predictor(predictions, name) for name in predictions.baselines}
        description["differences"] = {name: compare_with_baseline(predictions, name) for name in predictions.baselines}
    return description


def compare_with_baseline(predictions: Predictions, baseline: str) -> dict[str, Any]:
    """Return the differences between a run and a baseline, by metric."""
    if predictions.kind is None:
        return {}
    values, differences = predictions.values, {}
    for metric in METRICS[predictions.kind]:
        difference = compare_predictors(
            predictions.kind, metric, values[RUN], values[baseline], predictions.targets, predictions.sites
        )
        if difference is not None:
            differences[metric.name] = difference.to_dict()
    return differences


def _describe_predictor(predictions: Predictions, name: str) -> dict[str, Any]:
    """Return the metrics of a predictor that paired comparisons use, over all subjects and by site."""
    values, targets, sites = predictions.values[name], predictions.targets, predictions.sites
    metrics: dict[str, Any] = {"test_examples": len(sites)}
    for metric in METRICS[predictions.kind] if predictions.kind else ():
        if metric.score is None:
            continue
        scores = metric.score(values, targets)
        metrics[metric.name] = float(scores.mean())
        by_site = {str(site): float(scores[sites == site].mean()) for site in np.unique(sites)}
        metrics[f"{metric.name}_by_site"] = by_site
    if predictions.kind == "regression":
        metrics["r2_within_sites"] = compute_r2_within_sites(values, targets, sites)
    return metrics


def _describe_group(
    label: str, group: Sequence[RunResult], groups: Sequence[Sequence[RunResult]], labels: Sequence[str]
) -> dict[str, Any]:
    """Return the figures of runs that differ by seed and fold only: every subject with its mean over all tests."""
    tests = ExampleTests.collect(group)
    description: dict[str, Any] = {"label": label, "runs": [run.label for run in group], "subjects": None}
    if tests is None or tests.kind is None:
        return description
    metric = METRICS[tests.kind][0]
    own = tests.average(RUN, metric)
    if metric.score is None or own is None:
        return description
    description |= {"subjects": len(own), metric.name: float(np.mean(list(own.values())))}
    description |= {"differences": {}, "notes": {}}
    others: list[tuple[str, str, ExampleTests | None]] = [(name, name, tests) for name in tests.runs[0].baselines]
    others += [
        (other, RUN, ExampleTests.collect(runs))
        for other, runs in zip(labels, groups, strict=True)
        if runs is not group
    ]
    for other, name, other_tests in others:
        scores = other_tests.average(name, metric) if other_tests else None
        if other_tests is None or scores is None or other_tests.kind != tests.kind:
            continue
        keys, note = tests.match(other_tests)
        if note:
            description["notes"][other] = note
        if keys:
            difference = _compare(keys, own, scores, metric)
            description["differences"][other] = {metric.name: difference | {"subjects": len(keys)}}
    return description


@dataclass(frozen=True)
class ExampleTests:
    """Tests of examples by runs that differ by seed and fold only.

    Attributes:
        runs: predictions of the runs.
        rows: by example, the number of each run that tested it, and its row there.
    """

    runs: Sequence[Predictions]
    rows: Mapping[Key, Sequence[tuple[int, int]]]

    @classmethod
    def collect(cls, runs: Sequence[RunResult]) -> ExampleTests | None:
        """Collect the tests of runs; None if one has no predictions."""
        predictions = [run.predictions for run in runs if run.predictions is not None]
        rows: dict[Key, list[tuple[int, int]]] = {}
        for number, run in enumerate(runs):
            for row, key in enumerate(_list_keys(run)):
                rows.setdefault(key, []).append((number, row))
        return cls(predictions, rows) if len(predictions) == len(runs) else None

    @property
    def kind(self) -> Kind | None:
        """Kind of the targets."""
        return self.runs[0].kind

    def average(self, name: str, metric: PairedMetric) -> dict[Key, float] | None:
        """Return the mean score of a predictor on each example over the tests in all runs; None if a run lacks it."""
        if metric.score is None or any(name not in run.values for run in self.runs):
            return None
        scores = [metric.score(run.values[name], run.targets) for run in self.runs]
        return {key: float(np.mean([scores[number][row] for number, row in rows])) for key, rows in self.rows.items()}

    def match(self, other: ExampleTests) -> tuple[list[Key], str]:
        """Return the examples that both tested, and which sites are left out because their data differs."""
        if other is self:
            return sorted(self.rows), ""
        digests, other_digests = ({key[:2] for key in tests.rows} for tests in (self, other))
        shared_sites = {site for site, _ in digests} & {site for site, _ in other_digests}
        unequal = {site for site, _ in digests ^ other_digests} & shared_sites
        common = sorted(self.rows.keys() & other.rows.keys())
        compared = {key[0] for key in common}
        # At a site with changed targets, the equal ones may belong to other subjects, too.
        changed = {key[0] for key in common if not _are_equal([*self._list_targets(key), *other._list_targets(key)])}
        reasons = (
            (unequal - compared, "the runs do not have the same usable subjects there"),
            (unequal & compared, "some of the runs do not have the same usable subjects there"),
            (changed, "targets of the same subjects differ"),
        )
        notes = [f"{', '.join(sorted(sites))} left out: {reason}" for sites, reason in reasons if sites]
        keys = [key for key in common if key[0] not in changed]
        return keys, "; ".join(notes or ([] if keys else ["no subject is tested by both"]))

    def _list_targets(self, key: Key) -> list[np.ndarray]:
        """Return the targets of an example in all tests."""
        return [self.runs[number].targets[row] for number, row in self.rows[key]]


def _are_equal(targets: Sequence[np.ndarray]) -> bool:
    first = targets[0]
    return all(other.shape == first.shape and np.allclose(other, first, rtol=TARGET_TOLERANCE) for other in targets)


def _list_keys(run: RunResult) -> list[Key]:
    """Return the key of each row of a run's predictions.

    A subject whose identifier is not known counts as another subject in each run.
    """
    predictions, keys, counts = run.predictions, list[Key](), Counter[tuple[str, ...]]()
    if predictions is None:
        return keys
    for site, rank in zip(predictions.sites.tolist(), predictions.subjects.tolist(), strict=True):
        unknown = f"seed {run.summary['seed']}, fold {run.fold}, example {counts[site,]}"
        subject = (site, predictions.digests[site], str(rank) if rank >= 0 else unknown)
        keys.append((*subject, counts[subject]))
        counts.update([(site,), subject])
    return keys


def _compare(
    keys: Sequence[Key], first: Mapping[Key, float], second: Mapping[Key, float], metric: PairedMetric
) -> dict[str, Any]:
    """Return the difference over given examples."""
    own, other = (np.array([values[key] for key in keys]) for values in (first, second))
    sites = np.array([key[0] for key in keys])
    return compare_scores(own, other, sites, is_lower_better=metric.is_lower_better).to_dict()


def _describe_sizes(run: RunResult) -> list[dict[str, Any]]:
    """Return the metric over the sites of similar numbers of test examples."""
    sites = run.summary["final"]["sites"]
    rows, start = [], 1
    for end in (*SIZES, None):
        members = {
            site: metrics[TEST_EXAMPLES]
            for site, metrics in sites.items()
            if run.metric in metrics and metrics.get(TEST_EXAMPLES, 0) >= start
            and (end is None or metrics[TEST_EXAMPLES] < end)
        }  # fmt: skip
        if members:
            value = sum(sites[site][run.metric] * count for site, count in members.items()) / sum(members.values())
            rows.append({"from": start, "below": end, "sites": sorted(members), run.metric: value})
        start = end or start
    return rows


def _select_tests(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics on test examples."""
    return {name: value for name, value in metrics.items() if not name.startswith(VALIDATION)}
