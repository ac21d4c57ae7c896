"""What a run leaves behind: rounds, ledger, summary, models. Written as it happens, in formats that others read."""

from __future__ import annotations

from ..assemble import Assembly
from ..config import JobConfig, dump_config

from ..checkpoint.writing import write_json
from .model_files import ENCRYPTED, delete_models, save_mask, save_model, save_encrypted

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..checkpoint.writing import replace_atomically, sync_to_disk
from ..errors import ConfigError
from ..exchange import EncryptedValues
from ..federation import Evaluation, Outcome, RoundRecord
from ..mask import Mask
from ..params import Layout
from ..params import compute_digest
from ..task import Metric
from ..wire.ledger import Ledger



GROWING = ("rounds.jsonl", "ledger.jsonl")
"""Files that grow with every commit."""


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before it starts."""

    run: str
    name: str
    method: str
    seed: int
    rounds: int
    metric: Metric
    config: str  # resolved, YAML
    note: str = ""  # what the method found of the network


def build_run_facts(config: JobConfig, assembly: Assembly) -> RunFacts:
    """What the record of a run begins with."""
    method = assembly.method
    return RunFacts(
        run=assembly.run_id,
        name=config.name,
        method=method.name,
        seed=config.seed,
        rounds=method.config.rounds,
        metric=assembly.task.metric,
        config=dump_config(config),
        note=method.note,
    )


class RunFolder:
    """Writes the record of one run into a folder.

    Files: ``rounds.jsonl`` and ``ledger.jsonl`` (grow with every commit), ``summary.json``, ``model.safetensors``,
    ``mask.safetensors``, ``best_model.safetensors``, ``best_mask.safetensors``, ``config.yaml``. A model that the server
    cannot read is in ``encrypted_model.safetensors`` (and ``encrypted_best_model.safetensors``) instead.
    """

    def __init__(self, path: Path, facts: RunFacts, layout: Layout, ledger: Ledger):
        self.path, self.facts, self.layout, self.ledger = path, facts, layout, ledger
        self._began = time.monotonic()
        self._written = 0
        path.mkdir(parents=True, exist_ok=True)
        for name in GROWING:
            (path / name).write_text("")
        (path / "config.yaml").write_text(facts.config)

    def commit(self, record: RoundRecord) -> dict[str, Any]:
        """Append a committed round and its messages; returns the line of ``rounds.jsonl``."""
        with (self.path / "ledger.jsonl").open("a") as file:
            for line in self.ledger.lines[self._written :]:
                file.write(json.dumps(asdict(line)) + "\n")
        self._written = len(self.ledger.lines)
        entry = self._line(record)
        with (self.path / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return entry

    def _line(self, record: RoundRecord) -> dict[str, Any]:
        line = asdict(record)
        evaluation = line.pop("evaluation")
        named = {"metric": self.facts.metric.name, "unit": self.facts.metric.unit, "rounds": self.facts.rounds}
        figures = {"metrics": evaluation["overall"], "site_metrics": evaluation["sites"]}
        return {"run": self.facts.run, **line, **named, **figures}

    def finish(self, outcome: Outcome) -> dict[str, Any]:
        """Write models and summary, the summary last; returns it when all is on the disk.

        Raises:
            OSError: the disk is full or broken.
        """
        delete_models(self.path)
        self._save("", outcome.weights, outcome.mask, outcome.encrypted)
        best = outcome.best
        if best.weights is not None and best.mask is not None:
            self._save("best_", best.weights, best.mask, best.encrypted)
        summary = self._summary(outcome)
        for name in GROWING:
            sync_to_disk(self.path / name)
        write_json(self.path / "summary.json", summary)
        return summary

    def _save(self, which: str, weights: Tensor, mask: Mask, sealed: EncryptedValues | None) -> None:
        save_mask(self.path / f"{which}mask.safetensors", self.layout, mask)
        if sealed is None:
            save_model(self.path / f"{which}model.safetensors", self.layout, weights)
        else:
            save_encrypted(self.path / f"{ENCRYPTED}{which}model.safetensors", self.layout, sealed)

    def _summary(self, outcome: Outcome) -> dict[str, Any]:
        facts, metric = self.facts, self.facts.metric
        return {
            "run": facts.run,
            "name": facts.name,
            "method": facts.method,
            "note": facts.note,
            "seed": facts.seed,
            "rounds": facts.rounds,
            "sites": sorted({site for record in outcome.rounds for site in record.sites_asked}),
            "metric": asdict(metric),
            "final": _judged(outcome.evaluation),
            "best": {"round": outcome.best.round, "metrics": outcome.best.metrics},
            "sparsity": outcome.rounds[-1].sparsity,
            "traffic": sum_traffic(self.ledger),
            "seconds": time.monotonic() - self._began,
            "threads": torch.get_num_threads(),
            "model_sha256": None if outcome.encrypted else compute_digest(outcome.weights),
        }


def _judged(evaluation: Evaluation) -> dict[str, Any]:
    return {"metrics": evaluation.overall, "sites": evaluation.sites}


def sum_traffic(ledger: Ledger) -> dict[str, dict[str, float]]:
    """Sums of the ledger by direction: messages, scalars, bytes paid, dense bytes and the floor."""
    sums: dict[str, dict[str, float]] = {}
    for direction in ("down", "up"):
        lines = [line for line in ledger.lines if line.direction == direction]
        sums[direction] = {
            "messages": len(lines),
            "scalars_sent": sum(line.scalars_sent for line in lines),
            "payload_bytes": sum(line.payload_bytes for line in lines),
            "dense_bytes": sum(line.dense_bytes for line in lines),
            "floor_bytes": sum(line.floor_bytes for line in lines),
        }
    return sums




















