"""Record of a run: rounds, ledger, summary and models, in standard formats.

It grows line by line, also where a run that proceeds elsewhere is followed.
"""

import json
import platform
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...config.assemble import Assembly
from ...config.loading import dump_config
from ...config.schema import JobConfig
from ...core.checkpoint.writing import replace_atomically, sync_to_disk, write_json
from ...core.params import compute_digest
from ...core.version import VERSION
from ...methods.method import describe_site_model
from ...privacy.dp.config import PrivacyConfig
from ...rounds.endpoints.events import STEPPED_BACK
from ...rounds.federation.records import Outcome, RoundRecord
from ...wire.ledger import Ledger
from .model_files import delete_models, describe_model, save_model

APPENDED_FILES = ("rounds.jsonl", "ledger.jsonl")
"""Files that every commit appends to."""
CONFIG = "config.yaml"
"""Resolved configuration, written when the run starts."""
SUMMARY = "summary.json"
"""File that a run writes last; a folder without it belongs to a run that has not ended."""


def start_record(folder: Path) -> None:
    """Create a result folder with empty files of rounds and messages, and without the summary of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SUMMARY).unlink(missing_ok=True)
    for name in APPENDED_FILES:
        (folder / name).write_text("", encoding="utf-8")


class RecordWriter:
    """Writes the record of one run into a folder.

    Files: ``config.yaml``, ``rounds.jsonl`` and ``ledger.jsonl`` (extended by every commit), ``summary.json``,
    ``model.safetensors``, ``best_model.safetensors``.
    """

    def __init__(self, path: Path, config: JobConfig, assembly: Assembly, ledger: Ledger):
        self.path, self.config, self.assembly, self.ledger = path, config, assembly, ledger
        self._start_time = time.monotonic()
        self._lines_written = 0
        start_record(path)
        (path / CONFIG).write_text(dump_config(config))

    def commit(self, record: RoundRecord) -> dict[str, Any]:
        """Append a committed round and its messages; return the line of ``rounds.jsonl``."""
        with (self.path / "ledger.jsonl").open("a") as file:
            for line in self.ledger.lines[self._lines_written :]:
                file.write(json.dumps(asdict(line)) + "\n")
        self._lines_written = len(self.ledger.lines)
        entry = self._build_line(record)
        # The run stepped back: the lines of the commits that it discarded go, as they do when it is resumed.
        if any(event.event == STEPPED_BACK for event in record.events):
            self._drop_rounds(record.round)
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def _drop_rounds(self, first: int) -> None:
        """Remove the lines of round ``first`` and later ones from ``rounds.jsonl``."""
        path = self.path / "rounds.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        with replace_atomically(path) as part:
            part.write_text("".join(line for line in lines if json.loads(line)["round"] < first))

    def _build_line(self, record: RoundRecord) -> dict[str, Any]:
        line = asdict(record)
        evaluation = line.pop("evaluation")
        metric, rounds = self.assembly.task.metric, self.assembly.method.config.rounds
        labels = {"metric": metric.name, "unit": metric.unit, "rounds": rounds}
        figures = {"metrics": evaluation["overall"], "site_metrics": evaluation["sites"]}
        if self.config.privacy is None:
            del line["spent_epsilon"]
        return {"run": self.assembly.run_id, **line, **labels, **figures}

    def finish(self, outcome: Outcome) -> dict[str, Any]:
        """Write the models and then the summary.

        Returns:
            The summary, once every file is on disk.

        Raises:
            OSError: the disk is full or broken.
        """
        # A finished run is recognized by its summary, so the summary is written last: a crash before that leaves a
        # folder that counts as unfinished.
        delete_models(self.path)
        file, layout = self.path / "model.safetensors", self.assembly.layout
        save_model(file, layout, outcome.weights, outcome.mask)
        if (best := outcome.best.model) is not None:
            save_model(self.path / "best_model.safetensors", layout, best.to_vector(), best.mask)
        size = {"bytes": file.stat().st_size, **describe_model(layout, outcome.mask)}
        summary = {**self._build_summary(outcome), "model": size}
        for name in APPENDED_FILES:
            sync_to_disk(self.path / name)
        write_json(self.path / SUMMARY, summary)
        return summary

    def _build_summary(self, outcome: Outcome) -> dict[str, Any]:
        config, method, metric = self.config, self.assembly.method, self.assembly.task.metric
        return {
            "run": self.assembly.run_id,
            "name": config.name,
            # A class of the user's may have the name of another method.
            "method": config.method.name,
            "note": method.describe(),
            "personal_model": describe_site_model(method.config),
            "seed": config.seed,
            "rounds": method.config.rounds,
            "contributions": {site: asdict(part) for site, part in outcome.count_contributions().items()},
            "examples": outcome.examples,
            "events": [asdict(event) for event in outcome.events],
            "sites": sorted({site for record in outcome.rounds for site in record.sites_asked}),
            "metric": asdict(metric),
            "final": {"metrics": outcome.evaluation.overall, "sites": outcome.evaluation.sites},
            "best": {"round": outcome.best.round, "metrics": outcome.best.metrics},
            "stopped_after": outcome.stopped_after,
            "sparsity": outcome.rounds[-1].sparsity,
            "traffic": sum_traffic(self.ledger),
            "seconds": time.monotonic() - self._start_time,
            "threads": torch.get_num_threads(),
            "versions": collect_versions(),
            "model_sha256": compute_digest(outcome.weights),
            **({} if config.privacy is None else {"privacy": _describe_privacy(config.privacy, outcome)}),
        }


def collect_versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of the libraries that its results depend on."""
    return {"python": platform.python_version(), "flare-sparse": VERSION} | {
        name: version(name) for name in ("nvflare", "torch", "numpy")
    }


def _describe_privacy(privacy: PrivacyConfig, outcome: Outcome) -> dict[str, Any]:
    """Return the settings of differential privacy, what each site has spent, and what left outside the budget."""
    spent: dict[str, float] = {}
    for record in outcome.rounds:
        spent |= record.spent_epsilon
    # The number of test examples leaves with the metrics.
    declared = ["number of training examples", *(["metrics"] if privacy.metrics == "exact" else [])]
    return {**privacy.model_dump(mode="json"), "spent": dict(sorted(spent.items())), "outside_budget": declared}


COUNTS = ("scalars_sent", "payload_bytes", "dense_bytes", "floor_bytes")
"""Numbers of a message that the summary adds up."""


def sum_traffic(ledger: Ledger) -> dict[str, dict[str, float]]:
    """Return the ledger's sums by direction (``down``, ``up``): messages, scalars, payload, dense and floor bytes."""
    sums: dict[str, dict[str, float]] = {}
    for direction in ("down", "up"):
        lines = [line for line in ledger.lines if line.direction == direction]
        counts = {name: sum(getattr(line, name) for line in lines) for name in COUNTS}
        sums[direction] = {"messages": len(lines), **counts}
    return sums


ROUNDS = APPENDED_FILES[0]


class GrowingRecord:
    """Copies the lines of a run's ``rounds.jsonl`` into a folder as they become known; the ledger follows at the end.

    A run reports its rounds from the first one on also after a resume, so the file starts empty: no line comes twice.

    Args:
        folder: result folder; created if it does not exist.

    Attributes:
        count: number of lines of the file.
    """

    def __init__(self, folder: Path):
        self._file, self.count = folder / ROUNDS, 0
        start_record(folder)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to the file."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if text:
            # One write per call: a reader that follows the file sees whole lines.
            with self._file.open("a", encoding="utf-8") as file:
                file.write(text)
            self.count += text.count("\n")
