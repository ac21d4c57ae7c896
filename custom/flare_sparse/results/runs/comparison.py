"""Comparison of runs with their baselines and with one another, as plain data: ``flare-sparse report --json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from ...tasks.task import VALIDATION, Kind
from .baselines import number_labels
from .bootstrap import (
    MOST_PAIRED,
    PairedMetric,
    compare_predictors,
    compute_r2_within_sites,
    evaluate_metric,
    is_too_large,
    select_metrics,
)
from .predictions import RUN, Predictions
from .results import RunResult, group_by_seed

TARGET_TOLERANCE = 1e-5
"""Largest relative difference of one subject's target in two runs: their tasks may scale it in single precision."""
OTHER_SUBJECTS = (
    "the runs do not have the same usable subjects there, or the task names no subjects and seed or fold is another"
)


class Key(NamedTuple):
    """A tested example.

    Attributes:
        site: its site.
        digest: digest of the identifiers of the site; with seed and fold if the task names no subjects.
        subject: number of the subject at the site; of the example if the task names no subjects.
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


def describe_runs(runs: Sequence[RunResult], notes: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of runs, of their baselines, and of the differences between them.

    Args:
        runs: the runs, which share one metric.
        notes: by label, why a run has no predictions.
    """
    groups = group_by_seed(runs)
    labelled = [(label, ExampleTests.collect(group)) for label, group in groups]
    return {
        "runs": [_describe_run(run, notes.get(run.label, "")) for run in runs],
        "groups": [_describe_group(group, number, labelled) for number, (_, group) in enumerate(groups)],
    }


def _describe_run(run: RunResult, note: str) -> dict[str, Any]:
    """Return the figures of a run, with its differences to the baselines if its predictions are there.

    ``note`` says why a comparison lacks something; ``notes`` does so by baseline.
    """
    summary, tests = run.summary, ExampleTests.collect([run])
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
        "note": note or (run.predictions.note if run.predictions else ""),
    }
    if tests is not None:
        described, pooled = tests.describe(RUN), tests.runs[0].pooled
        # The task's ranking of all subjects is the one across sites, under the name of that within them.
        kept = {name: value for name, value in pooled.items() if f"{name}_across_sites" not in described}
        description["pooled"] = kept | described
        description["baselines"] = {name: tests.describe(name) for name in tests.baselines}
        description |= tests.compare({name: (tests, name) for name in tests.baselines})
    return description


def _describe_group(
    group: Sequence[RunResult], number: int, labelled: Sequence[tuple[str, ExampleTests | None]]
) -> dict[str, Any]:
    """Return the figures of runs that differ by seed and fold only: every subject with its mean over all tests.

    Args:
        group: the runs.
        number: of the group.
        labelled: label and tests of every group.
    """
    label, tests = labelled[number]
    description: dict[str, Any] = {"label": label, "runs": [run.label for run in group], "subjects": None}
    if tests is None or tests.kind is None:
        return {**description, "differences": {}, "notes": {}}
    description["subjects"] = len({key.owner for key in tests.rows})
    for metric in select_metrics(tests.kind, has_site_models=tests.has_site_models(RUN)):
        description[metric.name] = evaluate_metric(metric, *tests.collect_examples(RUN, metric, sorted(tests.rows)))
    others = {name: (tests, name) for name in tests.baselines}
    others |= {
        other: (found, RUN)
        for other, found in [*labelled[:number], *labelled[number + 1 :]]
        if found is not None and found.kind == tests.kind
    }
    return description | tests.compare(others)


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

    @property
    def baselines(self) -> list[str]:
        """Names of the baselines that all runs have the predictions of."""
        return [name for name in self.runs[0].values if name != RUN and all(name in run.values for run in self.runs)]

    def has_site_models(self, name: str) -> bool:
        """Return whether a predictor is another model at each site."""
        return any(name in run.site_models for run in self.runs)

    def collect_examples(self, name: str, metric: PairedMetric, keys: Sequence[Key]) -> tuple[np.ndarray, ...]:
        """Return scores of a predictor on examples, and their targets, sites and numbers of subjects.

        A score is the mean over the tests in all runs ``(n,)``. If the metric ranks within runs, there is one by run
        ``(n, r)``, NaN where a run did not test an example.
        """
        scores = [metric.score(run.values[name], run.targets) for run in self.runs]
        by_run = np.full((len(keys), len(scores)), np.nan)
        for place, key in enumerate(keys):
            for number, row in self.rows[key]:
                by_run[place, number] = scores[number][row]
        targets = np.array([self._list_targets(key)[0] for key in keys])
        sites, subjects = np.array([key.site for key in keys]), number_labels([key.owner for key in keys])
        return by_run if metric.ranks == "times" else np.nanmean(by_run, axis=1), targets, sites, subjects

    def describe(self, name: str) -> dict[str, Any]:
        """Return the metrics of a predictor of one run that comparisons use, over all subjects and by site."""
        keys, predictions = [*self.rows], self.runs[0]
        metrics: dict[str, Any] = {"test_examples": len(keys)}
        for metric in select_metrics(self.kind, has_site_models=self.has_site_models(name)):
            examples = self.collect_examples(name, metric, keys)
            sites = examples[2]
            metrics[metric.name] = evaluate_metric(metric, *examples)
            metrics[f"{metric.name}_by_site"] = {
                str(site): evaluate_metric(metric, *(part[sites == site] for part in examples))
                for site in np.unique(sites)
            }
        if self.kind == "regression":
            values, targets, sites = predictions.values[name], predictions.targets, predictions.sites
            metrics["r2_within_sites"] = compute_r2_within_sites(values, targets, sites)
        return metrics

    def compare(self, others: Mapping[str, tuple[ExampleTests, str]]) -> dict[str, dict[str, Any]]:
        """Return the ``differences`` of the runs from other predictors, by metric, and ``notes`` on what they lack.

        Args:
            others: by label, tests and the name of the predictor in them.
        """
        found: dict[str, dict[str, Any]] = {"differences": {}, "notes": {}}
        for label, (other, name) in others.items():
            keys, note = self.match(other)
            notes, differences = [note] if note else [], {}
            has_site_models = self.has_site_models(RUN) or other.has_site_models(name)
            for metric in select_metrics(self.kind, has_site_models=has_site_models) if keys else ():
                first, targets, sites, subjects = self.collect_examples(RUN, metric, keys)
                second, *_ = other.collect_examples(name, metric, keys)
                difference = compare_predictors(metric, first, second, targets, sites, subjects)
                if difference is not None:
                    differences[metric.name] = asdict(difference) | {"subjects": len(np.unique(subjects))}
                elif is_too_large(metric, len(keys)):
                    notes.append(f"no {metric.name}: it compares all pairs of at most {MOST_PAIRED:,} examples")
                else:
                    notes.append(f"no {metric.name}: it is undefined on these subjects or in many resamples of them")
            if differences:
                found["differences"][label] = differences
            if notes:
                found["notes"][label] = "; ".join(notes)
        return found

    def match(self, other: ExampleTests) -> tuple[list[Key], str]:
        """Return the examples that both tested, and a note on the sites left out because their data differs."""
        if other is self:
            return [*self.rows], ""
        own, others = ({(key.site, key.digest) for key in tests.rows} for tests in (self, other))
        unequal = {site for site, _ in own ^ others} & {site for site, _ in own} & {site for site, _ in others}
        common = sorted(self.rows.keys() & other.rows.keys())
        compared = {key.site for key in common}
        # At a site with changed targets, the equal ones may belong to other subjects, too.
        changed = {key.site for key in common if not _are_equal([*self._list_targets(key), *other._list_targets(key)])}
        reasons = (
            (unequal - compared, f"left out: {OTHER_SUBJECTS}"),
            (unequal & compared, f"in part left out: {OTHER_SUBJECTS}"),
            (changed, "left out: targets of the same subjects differ"),
        )
        notes = [f"{', '.join(sorted(sites))} {reason}" for sites, reason in reasons if sites]
        keys = [key for key in common if key.site not in changed]
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
        digest, subject = predictions.digests[site], str(rank)
        if rank < 0:
            # Runs that test one set of examples have one digest, whatever their seeds and folds.
            digest, subject = f"{digest}, seed {run.summary['seed']}, fold {run.fold}", f"example {counts[site,]}"
        owner = (site, digest, subject)
        keys.append(Key(*owner, counts[owner]))
        counts.update([(site,), owner])
    return keys


def _select_tests(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics on test examples."""
    return {name: value for name, value in metrics.items() if not name.startswith(VALIDATION)}
