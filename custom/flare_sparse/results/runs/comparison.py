"""Comparison of runs with their baselines and with one another, as plain data: ``flare-sparse report --json``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ...tasks.task import VALIDATION, Kind
from .bootstrap import (
    MOST_PAIRED,
    PairedMetric,
    compare_predictors,
    compute_r2_within_sites,
    evaluate_metric,
    is_too_large,
    select_metrics,
)
from .predictions import RUN, Predictions, number_labels
from .results import RunResult, group_by_seed, label_groups

TARGET_TOLERANCE = 1e-5
"""Largest relative difference of one subject's target in two runs: their tasks may scale it in single precision."""


class Key(NamedTuple):
    """A tested example.

    Attributes:
        site: its site.
        digest: digest of the identifiers of the site.
        subject: number of the subject at the site; seed, fold and example if the task names no subjects.
        number: number of the example among those of the subject.
    """

    site: str
    digest: str
    subject: str
    number: int

    @property
    def owner(self) -> tuple[str, str, str]:
        """Site, digest and subject, which all examples of the subject have."""
        return self[:3]

    @property
    def scope(self) -> str:
        """Within which runs the subject is known: in all, ``""``, or in those of one seed and fold."""
        return "" if self.subject.isdecimal() else self.subject.partition(", example")[0]


def describe_runs(runs: Sequence[RunResult], notes: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of runs, of their baselines, and of the differences between them.

    Args:
        runs: the runs, which share one metric.
        notes: by label, why a run has no predictions.
    """
    return {
        "runs": [_describe_run(run, notes.get(run.label, "")) for run in runs],
        "groups": describe_groups(runs),
    }


def describe_groups(runs: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Return the figures of runs that differ by seed and fold only, and their differences from the other groups."""
    groups = group_by_seed(list(runs))
    labelled = [(label, ExampleTests.collect(group)) for label, group in zip(label_groups(groups), groups, strict=True)]
    return [
        _describe_group(label, group, tests, [*labelled[:number], *labelled[number + 1 :]])
        for number, ((label, tests), group) in enumerate(zip(labelled, groups, strict=True))
    ]


def _describe_run(run: RunResult, note: str) -> dict[str, Any]:
    """Return the figures of a run, with its differences to the baselines if its predictions are there.

    ``note`` says why a comparison lacks something; ``notes`` does so by baseline.
    """
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
        },
        "worst_site": list(run.worst_site) if run.worst_site else None,
        "best": summary["best"],
        "bytes": {direction: sums["payload_bytes"] for direction, sums in summary["traffic"].items()},
        "pooled": None,
        "baselines": None,
        "differences": None,
        "notes": {},
        "note": note or (predictions.note if predictions else ""),
    }
    if predictions is not None:
        described = describe_predictor(predictions, RUN)
        # The task's ranking of all subjects is the one across sites, under the name of that within them.
        kept = {name: value for name, value in predictions.pooled.items() if f"{name}_across_sites" not in described}
        description["pooled"] = kept | described
        description["baselines"] = {name: describe_predictor(predictions, name) for name in predictions.baselines}
        description["differences"] = predictions.differences
        reasons = {
            name: explain_missing_metrics(predictions, name, found)
            for name, found in description["differences"].items()
        }
        description["notes"] = {name: reason for name, reason in reasons.items() if reason}
    return description


def explain_missing_metrics(predictions: Predictions, baseline: str, differences: Mapping[str, Any]) -> str:
    """Return why a comparison with a baseline lacks a metric; empty if it has all."""
    metrics = predictions.select_metrics(baseline)
    return "; ".join(_explain_lack(m, len(predictions.sites)) for m in metrics if m.name not in differences)


def _explain_lack(metric: PairedMetric, examples: int) -> str:
    if is_too_large(metric, examples):
        return f"no {metric.name}: it compares all pairs of at most {MOST_PAIRED:,} examples"
    return f"no {metric.name}: it is undefined on these subjects or in many resamples of them"


def describe_predictor(predictions: Predictions, name: str) -> dict[str, Any]:
    """Return the metrics of a predictor that paired comparisons use, over all subjects and by site."""
    values, targets, sites = predictions.values[name], predictions.targets, predictions.sites
    metrics: dict[str, Any] = {"test_examples": len(sites)}
    has_site_models, subjects = name in predictions.site_models, predictions.number_subjects()
    for metric in select_metrics(predictions.kind, has_site_models=has_site_models) if predictions.kind else ():
        examples = (metric.score(values, targets), targets, sites, subjects)
        metrics[metric.name] = evaluate_metric(metric, *examples)
        metrics[f"{metric.name}_by_site"] = {
            str(site): evaluate_metric(metric, *(part[sites == site] for part in examples)) for site in np.unique(sites)
        }
    if predictions.kind == "regression":
        metrics["r2_within_sites"] = compute_r2_within_sites(values, targets, sites)
    return metrics


def _describe_group(
    label: str,
    group: Sequence[RunResult],
    tests: ExampleTests | None,
    other_groups: Sequence[tuple[str, ExampleTests | None]],
) -> dict[str, Any]:
    """Return the figures of runs that differ by seed and fold only: every subject with its mean over all tests."""
    description: dict[str, Any] = {"label": label, "runs": [run.label for run in group], "subjects": None}
    if tests is None or tests.kind is None:
        return description
    description |= {"subjects": len({key.owner for key in tests.rows}), "differences": {}, "notes": {}}
    for metric in select_metrics(tests.kind, has_site_models=tests.has_site_models(RUN)):
        description[metric.name] = tests.evaluate(metric)
    others: list[tuple[str, str, ExampleTests | None]] = [(name, name, tests) for name in tests.runs[0].baselines]
    others += [(other, RUN, other_tests) for other, other_tests in other_groups]
    for other, name, other_tests in others:
        if other_tests is None or not other_tests.has_predictor(name) or other_tests.kind != tests.kind:
            continue
        differences, note = tests.compare(other_tests, name)
        if note:
            description["notes"][other] = note
        if differences:
            description["differences"][other] = differences
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

    def has_predictor(self, name: str) -> bool:
        """Return whether all runs have the predictions of a predictor."""
        return all(name in run.values for run in self.runs)

    def has_site_models(self, name: str) -> bool:
        """Return whether a predictor is another model at each site."""
        return any(name in run.site_models for run in self.runs)

    def collect_scores(self, name: str, metric: PairedMetric, keys: Sequence[Key]) -> np.ndarray:
        """Return the mean score ``(n,)`` of a predictor on each example over the tests in all runs.

        If the metric ranks within runs, return the scores ``(n, r)`` by run, NaN where a run did not test an example.
        """
        scores = [metric.score(run.values[name], run.targets) for run in self.runs]
        if metric.is_within_runs:
            by_run = np.full((len(keys), len(scores)), np.nan)
            for place, key in enumerate(keys):
                for number, row in self.rows[key]:
                    by_run[place, number] = scores[number][row]
            return by_run
        return np.array([np.mean([scores[number][row] for number, row in self.rows[key]]) for key in keys])

    def evaluate(self, metric: PairedMetric) -> float | None:
        """Return a metric of the runs' mean scores; None if it is undefined."""
        keys = sorted(self.rows)
        targets, sites, subjects = self._describe_examples(keys)
        return evaluate_metric(metric, self.collect_scores(RUN, metric, keys), targets, sites, subjects)

    def compare(self, other: ExampleTests, name: str) -> tuple[dict[str, Any], str]:
        """Return the differences of the runs from another predictor by metric, and a note on what is left out."""
        keys, note = self.match(other)
        if not keys or self.kind is None:
            return {}, note
        targets, sites, subjects = self._describe_examples(keys)
        num_subjects, notes, differences = len(np.unique(subjects)), [note] if note else [], {}
        has_site_models = self.has_site_models(RUN) or other.has_site_models(name)
        for metric in select_metrics(self.kind, has_site_models=has_site_models):
            scores = self.collect_scores(RUN, metric, keys), other.collect_scores(name, metric, keys)
            difference = compare_predictors(metric, *scores, targets, sites, subjects)
            if difference is not None:
                differences[metric.name] = asdict(difference) | {"subjects": num_subjects}
            else:
                notes.append(_explain_lack(metric, len(keys)))
        return differences, "; ".join(notes)

    def _describe_examples(self, keys: Sequence[Key]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return targets ``(n, t)``, sites ``(n,)`` and numbers of the subjects ``(n,)`` of examples."""
        targets = np.array([self._list_targets(key)[0] for key in keys])
        return targets, np.array([key.site for key in keys]), number_labels([key.owner for key in keys])

    def match(self, other: ExampleTests) -> tuple[list[Key], str]:
        """Return the examples that both tested, and a note on the sites left out because their data differs."""
        if other is self:
            return sorted(self.rows), ""
        unequal, unpaired = _find_unequal_sites(self.rows, other.rows)
        common = sorted(self.rows.keys() & other.rows.keys())
        compared = {key.site for key in common}
        # At a site with changed targets, the equal ones may belong to other subjects, too.
        changed = {key.site for key in common if not _are_equal([*self._list_targets(key), *other._list_targets(key)])}
        reasons = (
            (unequal - compared, "left out: the runs do not have the same usable subjects there"),
            (unequal & compared, "in part left out: some of the runs do not have the same usable subjects there"),
            (unpaired - compared, "left out: the task names no subjects, and no two runs have the same seed and fold"),
            (unpaired & compared, "in part left out: the task names no subjects, so only runs of one seed are paired"),
            (changed, "left out: targets of the same subjects differ"),
        )
        notes = [f"{', '.join(sorted(sites))} {reason}" for sites, reason in reasons if sites]
        keys = [key for key in common if key.site not in changed]
        return keys, "; ".join(notes or ([] if keys else ["no subject is tested by both"]))

    def _list_targets(self, key: Key) -> list[np.ndarray]:
        """Return the targets of an example in all tests."""
        return [self.runs[number].targets[row] for number, row in self.rows[key]]


def _find_unequal_sites(keys: Iterable[Key], others: Iterable[Key]) -> tuple[set[str], set[str]]:
    """Return the sites whose subjects differ in two groups of runs, and those without subjects whose runs differ."""
    digests, other_digests = _collect_digests(keys), _collect_digests(others)
    common = digests.keys() & other_digests.keys()
    unequal = {site for site, scope in common if digests[site, scope] != other_digests[site, scope]}
    both = {site for site, _ in digests} & {site for site, _ in other_digests}
    unpaired = {site for site, scope in digests.keys() ^ other_digests.keys() if scope and site in both}
    return unequal, unpaired - unequal


def _collect_digests(keys: Iterable[Key]) -> Mapping[tuple[str, str], set[str]]:
    """Return the digests of identifiers, by site and by the scope of the subjects."""
    digests: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for key in keys:
        digests[key.site, key.scope].add(key.digest)
    return digests


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
        keys.append(Key(*subject, counts[subject]))
        counts.update([(site,), subject])
    return keys


def _select_tests(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics on test examples."""
    return {name: value for name, value in metrics.items() if not name.startswith(VALIDATION)}
