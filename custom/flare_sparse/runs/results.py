"""The record of a run, read back from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors

from ..errors import ConfigError


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        label: what it is called beside others.
        path: its folder.
        summary: of ``summary.json``.
        rounds: lines of ``rounds.jsonl``.
        messages: lines of ``ledger.jsonl``.
    """

    label: str
    path: Path
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    messages: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Run:
        """The record in a result folder.

        Raises:
            ConfigError: it is none, or the run has not ended.
        """
        try:
            summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
            rounds, messages = (
                [json.loads(line) for line in (path / name).read_text(encoding="utf-8").splitlines()]
                for name in ("rounds.jsonl", "ledger.jsonl")
            )
            summary["metric"]["name"], summary["traffic"]["down"], summary["final"]["sites"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}: no record of a finished run ({type(error).__name__}: {error}); expected the result folder of "
                "flare-sparse run or rehearse, with summary.json, rounds.jsonl and ledger.jsonl"
            ) from error
        return cls(summary["name"], path, summary, rounds, messages)

    @property
    def metric(self) -> str:
        """Name of the figure that the task is judged by."""
        return str(self.summary["metric"]["name"])

    @property
    def metric_label(self) -> str:
        """``mae (years)``."""
        unit = self.summary["metric"]["unit"]
        return f"{self.metric} ({unit})" if unit else self.metric

    @property
    def lower_is_better(self) -> bool:
        return bool(self.summary["metric"]["mode"] == "min")

    @property
    def final(self) -> float | None:
        """The metric over all sites' test examples at the end."""
        figure = self.summary["final"]["metrics"].get(self.metric)
        return None if figure is None else float(figure)

    @cached_property
    def by_site(self) -> dict[str, float]:
        """The metric at the end by site."""
        sites = self.summary["final"]["sites"]
        return {site: float(found[self.metric]) for site, found in sorted(sites.items()) if self.metric in found}

    @property
    def worst(self) -> tuple[str, float] | None:
        """The site with the worst figure."""
        if not self.by_site:
            return None
        pick = max if self.lower_is_better else min
        return pick(self.by_site.items(), key=lambda item: item[1])

    def gains(self, alone: Run) -> dict[str, float]:
        """By how much each site is better off than with what it reaches alone; below 0: worse off.

        Args:
            alone: a run of ``local_only`` on the same metric; sites that only one of the two judged are left out.
        """
        towards = -1 if self.lower_is_better else 1
        both = [site for site in self.by_site if site in alone.by_site]
        return {site: towards * (self.by_site[site] - alone.by_site[site]) for site in both}

    @cached_property
    def curve(self) -> list[tuple[int, float, float]]:
        """Round that was judged, metric, MB sent before that."""
        points, sent = [], 0.0
        for line in self.rounds:
            if self.metric in line["metrics"]:
                points.append((int(line["evaluated_round"]), float(line["metrics"][self.metric]), sent / 1e6))
            sent += line["bytes_down"] + line["bytes_up"]
        return points

    def total(self, what: str) -> int:
        """Sum over both directions: ``payload_bytes``, ``dense_bytes``, ``floor_bytes``, ``messages``."""
        return sum(int(self.summary["traffic"][way][what]) for way in ("down", "up"))

    @property
    def less(self) -> float:
        """How many times less was sent than dense FedAvg would have."""
        return self.total("dense_bytes") / max(self.total("payload_bytes"), 1)

    @cached_property
    def layers(self) -> dict[str, float]:
        """Share of live entries of every tensor of two or more dimensions; empty without a mask."""
        file = self.path / "mask.safetensors"
        if not file.is_file():
            return {}
        with safetensors.safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (not a dictionary)
        return {name: float(part.float().mean()) for name, part in tensors.items() if part.dim() > 1}


def dense_beside(run: Run, runs: list[Run]) -> Run | None:
    """The run of dense FedAvg with this one's seed: of one task, they have the same start and the same split."""
    dense = [other for other in runs if other.summary["method"] == "fedavg" and abs(other.less - 1) < 0.05]
    return None if run in dense else _of_its_seed(run, dense)


def gains_over_alone(runs: list[Run]) -> dict[str, dict[str, float]]:
    """By label, the gains of each run over the one of ``local_only`` with its seed; empty where nothing can be compared."""
    alone = [run for run in runs if run.summary["method"] == "local_only"]
    pairs = [(run, _of_its_seed(run, alone)) for run in runs if run not in alone]
    found = {run.label: run.gains(other) for run, other in pairs if other}
    return {label: gains for label, gains in found.items() if gains}


def _of_its_seed(run: Run, others: list[Run]) -> Run | None:
    return next((other for other in others if other.summary["seed"] == run.summary["seed"]), None)


def read_runs(paths: list[Path]) -> list[Run]:
    """Runs with labels that differ: the method where it tells them apart, else the folder.

    Raises:
        ConfigError: one is no record, or they are judged by different metrics.
    """
    runs = [Run.read(path) for path in paths]
    if len({run.metric for run in runs}) > 1:
        listed = ", ".join(f"{run.path.name}: {run.metric}" for run in runs)
        raise ConfigError(f"these runs are judged by different metrics ({listed}); report them apart")
    methods = [str(run.summary["method"]) for run in runs]
    names = methods if len(set(methods)) == len(methods) else [run.path.name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.path) for run in runs]
    return [Run(name, r.path, r.summary, r.rounds, r.messages) for name, r in zip(names, runs, strict=True)]
