"""Comparison of runs with their baselines and with one another, as plain data: ``flare-sparse report --json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..task import TEST_EXAMPLES, VALIDATION
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
}
Key = tuple[str, ...]


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
    predictions = [run.predictions for run in group]
    kind = next((p.kind for p in predictions if p), None)
    description: dict[str, Any] = {"label": label, "runs": [run.label for run in group], "subjects": None}
    if kind is None or any(p is None for p in predictions):
        return description
    metric = METRICS[kind][0]
    own = collect_scores(group, RUN, metric)
    if metric.score is None or own is None:
        return description
    others: dict[str, dict[Key, float] | None] = {
        name: collect_scores(group, name, metric) for name in (predictions[0].baselines if predictions[0] else [])
    }
    others |= {
        other: collect_scores(runs, RUN, metric)
        for other, runs in zip(labels, groups, strict=True)
        if runs is not group
    }
    description |= {"subjects": len(own), metric.name: float(np.mean(list(own.values())))}
    description["differences"] = {
        name: {metric.name: difference}
        for name, scores in others.items()
        if scores and (difference := _compare_common(own, scores, metric))
    }
    return description


def collect_scores(runs: Sequence[RunResult], name: str, metric: PairedMetric) -> dict[Key, float] | None:
    """Return the mean score of each subject over the tests in all runs; None if a run lacks it.

    A subject whose identifier is not known counts as another subject in each run.
    """
    collected: dict[Key, list[float]] = {}
    for run in runs:
        predictions = run.predictions
        if predictions is None or name not in predictions.values or metric.score is None:
            return None
        scores = metric.score(predictions.values[name], predictions.targets)
        for row, (site, subject) in enumerate(zip(predictions.sites, predictions.subjects, strict=True)):
            unknown = (str(run.summary["seed"]), str(run.fold), str(row))
            key: Key = (str(site), str(subject)) if subject >= 0 else (str(site), *unknown)
            collected.setdefault(key, []).append(float(scores[row]))
    return {key: float(np.mean(values)) for key, values in collected.items()}


def _compare_common(
    first: Mapping[Key, float], second: Mapping[Key, float], metric: PairedMetric
) -> dict[str, Any] | None:
    """Return the difference over the subjects that both have; None without any."""
    keys = sorted(first.keys() & second.keys())
    if not keys:
        return None
    own, other = (np.array([values[key] for key in keys]) for values in (first, second))
    sites = np.array([key[0] for key in keys])
    return compare_scores(own, other, sites, is_lower_better=metric.is_lower_better).to_dict() | {"subjects": len(keys)}


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
