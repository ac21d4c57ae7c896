"""Reader of a run's record, and comparisons between runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

from ...cohorts.subgroups import split_metric
from ...config.withdrawals import Withdrawals
from ...config.yaml_files import read_yaml
from ...core.errors import ConfigError
from ...rounds.federation.records import Participation
from ...tasks.task import TEST_EXAMPLES, VALIDATION, VALIDATION_EXAMPLES
from .predictions import PREDICTIONS_FILE, CasePicture, Predictions
from .received import check_links, neutralize, parse_record, read_json
from .record import CONFIG

EVALUATIONS = "evaluations"
"""Folder of the evaluations of a run's models, in the result folder."""
CROSS_SITE_FILE = "cross_site.json"
"""File in that folder with the metrics of every model at every site."""
COST_FILE = "cost.json"
"""File in that folder with what a prediction of the final model costs."""
AUDIT_FILE = "audit.json"
"""File with the record of ``flare-sparse audit``, in the result folder."""
AUDIT_FOLDER = "audit"
"""Folder with what an interrupted audit continues from, in the result folder."""


@dataclass(frozen=True)
class RunResult:
    """Record of a finished run.

    Attributes:
        label: name of the run in tables and figures.
        path: result folder.
        summary: content of ``summary.json``.
        rounds: lines of ``rounds.jsonl``.
        messages: lines of ``ledger.jsonl``.
        pictures: of some test cases of every site; only where a report is written beside their data.
        is_plain: nothing that was computed from single subjects is read.
    """

    label: str
    path: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    pictures: Sequence[CasePicture] = ()
    is_plain: bool = False

    @classmethod
    def read(cls, path: Path) -> RunResult:
        """Read the record in a result folder.

        Raises:
            ConfigError: the folder holds no record or leads out of itself, or the run has not finished.
        """
        check_links(path)
        try:
            summary = parse_record((path / "summary.json").read_text(encoding="utf-8"))
            rounds, messages = (
                [parse_record(line) for line in (path / name).read_text(encoding="utf-8").splitlines()]
                for name in ("rounds.jsonl", "ledger.jsonl")
            )
            # Fail here, with a clear message, if a key that the properties below read is missing.
            summary["metric"]["name"], summary["traffic"]["down"], summary["final"]["sites"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            # A recipe leaves the record deep in FLARE's workspace, or in the downloaded job.
            inner = next((str(file.parent) for file in path.glob("**/flare_sparse/summary.json")), None)
            found = f"{type(error).__name__}: {error}" if path.is_dir() else "there is no such folder"
            raise ConfigError(
                f"{path}: no record of a finished run ({found}); expected "
                + (inner or "the result folder of flare-sparse run, with summary.json, rounds.jsonl and ledger.jsonl")
            ) from error
        return cls(summary["name"], path, summary, rounds, messages)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of ``config.yaml``; empty if it is missing."""
        file = self.path / CONFIG
        return dict(neutralize(read_yaml(file))) if file.is_file() else {}

    @property
    def fold(self) -> int | None:
        """The fold that the run tests; None without folds."""
        split = self.config.get("task", {}).get("split", {})
        return int(split["fold"]) if split.get("folds") else None

    @property
    def split(self) -> tuple[int, int | None]:
        """Seed and fold; runs that have both alike have the same initial weights, and the same parts of the data."""
        return self.summary["seed"], self.fold

    @property
    def times(self) -> tuple[datetime, datetime]:
        """When the first round started and the last one was committed, to the second, in UTC."""
        first, last = self.rounds[0], self.rounds[-1]
        start = datetime.fromtimestamp(first["committed_at"], UTC) - timedelta(seconds=first["seconds"])
        return start.replace(microsecond=0), datetime.fromtimestamp(last["committed_at"], UTC).replace(microsecond=0)

    @property
    def withdrawn(self) -> str:
        """Who has withdrawn from the run, and what that means; empty if nobody has."""
        return str(neutralize(Withdrawals.read(self.path).describe()))

    @property
    def is_synthetic(self) -> bool:
        """Whether the data was generated, and is of no patients."""
        return bool(((self.config.get("simulator") or {}).get("data") or {}).get("phantom"))

    @property
    def metric(self) -> str:
        """Name of the task's metric."""
        return str(self.summary["metric"]["name"])

    @property
    def metric_label(self) -> str:
        """Metric with its unit, such as ``mae (years)``."""
        unit = self.summary["metric"]["unit"]
        return f"{self.metric} ({unit})" if unit else self.metric

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower value of the metric is better."""
        return bool(self.summary["metric"]["mode"] == "min")

    @property
    def final_metric(self) -> float | None:
        """Metric of the final model over all sites' test examples; None if there was no overall evaluation."""
        value = self.summary["final"]["metrics"].get(self.metric)
        return None if value is None else float(value)

    @cached_property
    def site_metrics(self) -> dict[str, float]:
        """Metric of the final model by site, in name order."""
        sites = self.summary["final"]["sites"]
        return {site: float(metrics[self.metric]) for site, metrics in sorted(sites.items()) if self.metric in metrics}

    @property
    def worst_site(self) -> tuple[str, float] | None:
        """The site with the worst metric, and that metric; None if no site was evaluated."""
        select_worst = max if self.lower_is_better else min
        return select_worst(self.site_metrics.items(), key=lambda item: item[1], default=None)

    def compute_gains(self, local_only: RunResult) -> dict[str, float]:
        """Return each site's gain over training alone; negative: the site is worse off in the federation.

        Args:
            local_only: a run of ``local_only`` with the same metric. Sites evaluated in only one run are omitted.
        """
        sign = -1 if self.lower_is_better else 1
        sites = [site for site in self.site_metrics if site in local_only.site_metrics]
        return {site: sign * (self.site_metrics[site] - local_only.site_metrics[site]) for site in sites}

    @cached_property
    def learning_curve(self) -> list[tuple[int, float, float]]:
        """Per evaluation: the evaluated round, its metric, and the MB sent before the evaluation."""
        points, sent = [], 0.0
        for line in self.rounds:
            if self.metric in line["metrics"]:
                points.append((int(line["evaluated_round"]), float(line["metrics"][self.metric]), sent / 1e6))
            sent += line["bytes_down"] + line["bytes_up"]
        return points

    @cached_property
    def metric_names(self) -> list[str]:
        """Names of all metrics of the final model on test examples, the task's own metric first."""
        parts = [self.summary["final"]["metrics"], *self.summary["final"]["sites"].values()]
        names = {name for metrics in parts for name in metrics if not name.startswith(VALIDATION)}
        names = {name for name in names if split_metric(name) is None}
        return sorted(names - {TEST_EXAMPLES} | {self.metric}, key=lambda name: (name != self.metric, name))

    @cached_property
    def contributions(self) -> dict[str, Participation]:
        """In how many rounds each site was asked and contributed, in name order; no evaluation counts."""
        return {site: Participation(**part) for site, part in sorted(self.summary["contributions"].items())}

    @property
    def idle_sites(self) -> list[str]:
        """Sites that were to contribute and did so in no round; none that the method itself never asks."""
        return [site for site, part in self.contributions.items() if part.is_idle]

    @property
    def cohorts(self) -> dict[str, dict[str, int | None]]:
        """Examples for training, validation and test by site, as the sites reported them; None: not reported."""
        trained, cohorts = self.summary.get("examples", {}), {}
        for site in self.sites:
            final = self.summary["final"]["sites"].get(site, {})
            parts = {"train": trained.get(site), "validation": final.get(VALIDATION_EXAMPLES)}
            parts["test"] = final.get(TEST_EXAMPLES)
            cohorts[site] = {part: None if count is None else int(count) for part, count in parts.items()}
        return cohorts

    @property
    def sites(self) -> list[str]:
        """All sites that the record names, with or without contributions and test examples."""
        return sorted({*self.summary["sites"], *self.summary["final"]["sites"], *self.contributions})

    @cached_property
    def best_site_metrics(self) -> dict[str, dict[str, float]]:
        """Metrics of the best model by site; empty without a best model."""
        best = self.summary["best"]["round"]
        return next((line["site_metrics"] for line in self.rounds if best >= 0 and line["evaluated_round"] == best), {})

    @property
    def personal_model(self) -> str:
        """What each site's own model is, which the final metrics are of; empty where they are of the run's model."""
        return str(self.summary.get("personal_model", ""))

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of ``flare-sparse evaluate --data``, by file name; files that are no such record are passed over."""
        records = [read_json(file) for file in sorted((self.path / EVALUATIONS).glob("*.json"))]
        return [record for record in records if record.keys() >= {"cohort", "model", "metrics", "examples"}]

    @cached_property
    def predictions(self) -> Predictions | None:
        """Predictions for every test subject; None before ``flare-sparse report`` computes them, and if plain."""
        return None if self.is_plain else Predictions.read(self.path / EVALUATIONS / PREDICTIONS_FILE, self.identity)

    @cached_property
    def cost(self) -> dict[str, Any]:
        """What a prediction costs, by ``flare-sparse report``; empty if it is not measured."""
        record = read_json(self.path / EVALUATIONS / COST_FILE)
        return record if record.get("identity") == self.identity else {}

    @property
    def identity(self) -> str:
        """Run id and digest of the final model, which the predictions of a run name."""
        return f"{self.summary['run']}:{self.summary['model_sha256']}"

    @cached_property
    def cross_site(self) -> dict[str, Any]:
        """Record of ``flare-sparse evaluate RUN``; empty without one."""
        record = read_json(self.path / EVALUATIONS / CROSS_SITE_FILE)
        return record if record.keys() >= {"results", "examples"} else {}

    @cached_property
    def audit(self) -> dict[str, Any]:
        """Record of ``flare-sparse audit``; empty without one, or if it is of another model."""
        record = read_json(self.path / AUDIT_FILE)
        is_current = record.get("model_sha256") == self.summary["model_sha256"]
        return record if is_current and record.keys() >= {"attacks", "skipped"} else {}

    def sum_directions(self, key: str) -> int:
        """Return a count summed over both directions.

        Args:
            key: ``messages``, ``payload_bytes``, ``dense_bytes`` or ``floor_bytes``.
        """
        return sum(int(self.summary["traffic"][direction][key]) for direction in ("down", "up"))

    @cached_property
    def layer_densities(self) -> dict[str, float]:
        """Share of live entries of every tensor with two or more dimensions."""
        return {name: live / max(size, 1) for name, (live, size) in self.summary["model"]["layers"].items()}


def group_by_seed(runs: Sequence[RunResult]) -> list[tuple[str, list[RunResult]]]:
    """Return the runs in groups whose members differ by nothing but their seed and fold, in the order of ``runs``.

    Each has its label in tables and figures.
    """
    alike: dict[str, list[RunResult]] = {}
    for run in runs:
        settings = _select_settings(run.config) or str(run.path)
        alike.setdefault(json.dumps([settings, run.metric, run.summary["method"]], sort_keys=True), []).append(run)
    groups: list[list[RunResult]] = []
    for group in alike.values():
        # Two runs of one seed and fold are no independent repetitions: their mean and range would mean nothing.
        is_repeated = len({run.split for run in group}) == len(group)
        groups += [group] if is_repeated else [[run] for run in group]
    methods = [str(group[0].summary["method"]) for group in groups]
    labelled = []
    for method, group in zip(methods, groups, strict=True):
        counts = {"seeds": len({run.summary["seed"] for run in group}), "folds": len({run.fold for run in group})}
        repeated = ", ".join(f"{count} {what}" for what, count in counts.items() if count > 1)
        name = method if methods.count(method) == 1 else group[0].label
        labelled.append((f"{name} ({repeated})" if repeated else group[0].label, group))
    return labelled


def _select_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run without its name, seed and fold."""
    if not config:
        return {}
    task = dict(config.get("task", {}))
    if split := task.get("split"):
        task["split"] = {name: value for name, value in split.items() if name != "fold"}
    return {
        name: value for name, value in {**config, "task": task}.items() if name not in ("seed", "name", "deployment")
    }


def compute_site_gains(runs: list[RunResult]) -> dict[str, dict[str, float]]:
    """Return the gains of each run's sites over the ``local_only`` run with the same split, by label and site.

    Runs without such a ``local_only`` run, or without common sites, are omitted.
    """
    # Go backwards, so that the first of several counts.
    alone = {run.split: run for run in reversed(runs) if run.summary["method"] == "local_only"}
    pairs = [(run, alone.get(run.split)) for run in runs if run.summary["method"] != "local_only"]
    gains = {run.label: run.compute_gains(other) for run, other in pairs if other}
    return {label: own for label, own in gains.items() if own}


def read_runs(paths: list[Path]) -> list[RunResult]:
    """Read runs and label them: by method if that is unique, else by folder name, else by path.

    Raises:
        ConfigError: a folder holds no record, or the runs have different metrics.
    """
    runs = [RunResult.read(path) for path in paths]
    if len({run.metric for run in runs}) > 1:
        metrics = ", ".join(f"{run.path.name}: {run.metric}" for run in runs)
        raise ConfigError(f"these runs have different metrics ({metrics}); report them separately")
    methods = [str(run.summary["method"]) for run in runs]
    labels = methods if len(set(methods)) == len(methods) else [run.path.name for run in runs]
    if len(set(labels)) < len(labels):
        labels = [str(run.path) for run in runs]
    return [replace(run, label=label) for label, run in zip(labels, runs, strict=True)]
