"""What a run leaves behind: rounds, ledger, summary, models. Written as it happens, in formats that others read."""

from __future__ import annotations

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

from .checkpoint.writing import replacing, sync
from .errors import ConfigError
from .exchange import Sealed
from .federation import Judgement, Outcome, RoundRecord
from .mask import Mask
from .params import Layout
from .server import digest
from .task import Metric
from .wire.ledger import Ledger

ENCRYPTED = "encrypted_"
"""What the name of a model's file begins with when nobody without the key can read it."""


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
        judgement = line.pop("judgement")
        named = {"metric": self.facts.metric.name, "unit": self.facts.metric.unit, "rounds": self.facts.rounds}
        figures = {"metrics": judgement["overall"], "site_metrics": judgement["sites"]}
        return {"run": self.facts.run, **line, **named, **figures}

    def finish(self, outcome: Outcome) -> dict[str, Any]:
        """Write models and summary, the summary last; returns it when all is on the disk.

        Raises:
            OSError: the disk is full or broken.
        """
        clear_models(self.path)
        self._save("", outcome.weights, outcome.mask, outcome.sealed)
        best = outcome.best
        if best.weights is not None and best.mask is not None:
            self._save("best_", best.weights, best.mask, best.sealed)
        summary = self._summary(outcome)
        for name in GROWING:
            sync(self.path / name)
        write_json(self.path / "summary.json", summary)
        return summary

    def _save(self, which: str, weights: Tensor, mask: Mask, sealed: Sealed | None) -> None:
        save_mask(self.path / f"{which}mask.safetensors", self.layout, mask)
        if sealed is None:
            save_model(self.path / f"{which}model.safetensors", self.layout, weights)
        else:
            save_sealed(self.path / f"{ENCRYPTED}{which}model.safetensors", self.layout, sealed)

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
            "final": _judged(outcome.judgement),
            "best": {"round": outcome.best.round, "metrics": outcome.best.metrics},
            "sparsity": outcome.rounds[-1].sparsity,
            "traffic": traffic(self.ledger),
            "seconds": time.monotonic() - self._began,
            "threads": torch.get_num_threads(),
            "model_sha256": None if outcome.sealed else digest(outcome.weights),
        }


def _judged(judgement: Judgement) -> dict[str, Any]:
    return {"metrics": judgement.overall, "sites": judgement.sites}


def traffic(ledger: Ledger) -> dict[str, dict[str, float]]:
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


def save_model(path: Path, layout: Layout, weights: Tensor) -> None:
    """Named float32 tensors; ``load_model`` and ``safetensors`` read them back."""
    _write(path, layout.unflatten(weights), {"layout": layout.fingerprint, "sha256": digest(weights)})


def save_mask(path: Path, layout: Layout, mask: Mask) -> None:
    """Named bool tensors: what lives."""
    _write(path, layout.unflatten(mask.on), {"layout": layout.fingerprint, "fingerprint": mask.fingerprint})


def load_model(path: Path, layout: Layout) -> Tensor:
    """The vector ``(P,)`` in a file of :func:`save_model`.

    Raises:
        ConfigError: there is no such file, it is none of ours, or it is of another network.
    """
    return layout.flatten(_load(path, layout, torch.float32))


def save_sealed(path: Path, layout: Layout, sealed: Sealed) -> None:
    """The encrypted values of a model; :func:`load_sealed` reads them back."""
    _write(path, {"values": sealed.data}, {"layout": layout.fingerprint})


def _write(path: Path, tensors: Mapping[str, Tensor], said: dict[str, str]) -> None:
    """Whole and on the disk, or not at all."""
    with replacing(path) as part:
        safetensors.torch.save_file({n: tensor.contiguous() for n, tensor in tensors.items()}, part, metadata=said)


def clear_models(folder: Path) -> None:
    """Forget an earlier run's models, readable or not, before those of a new one come: the two must not be mixed up."""
    for name in ("model.safetensors", "best_model.safetensors"):
        (folder / name).unlink(missing_ok=True)
        (folder / f"{ENCRYPTED}{name}").unlink(missing_ok=True)


def load_sealed(path: Path, layout: Layout) -> Sealed:
    """The encrypted values in a file of :func:`save_sealed`.

    Raises:
        ConfigError: there is no such file, it is none of ours, or it is of another network.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            of, data = (file.metadata() or {}).get("layout"), file.get_tensor("values")
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{path}: cannot be read as an encrypted model of a run: {error}") from error
    if of != layout.fingerprint or data.dtype != torch.uint8 or data.dim() != 1:
        raise ConfigError(f"{path}: holds another network: its layout is {of}, expected {layout.fingerprint}")
    return Sealed(data)


def load_mask(path: Path, layout: Layout) -> Mask:
    """The mask in a file of :func:`save_mask`.

    Raises:
        ConfigError: as :func:`load_model`.
    """
    return Mask(layout.flatten(_load(path, layout, torch.bool)))


def _load(path: Path, layout: Layout, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            of = (file.metadata() or {}).get("layout")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
    except (OSError, safetensors.SafetensorError) as error:
        if (path.parent / f"{ENCRYPTED}{path.name}").is_file():
            raise ConfigError(
                f"{path}: the run's model is encrypted; at a site: flare-sparse decrypt {path.parent} --context FILE"
            ) from error
        raise ConfigError(f"{path}: cannot be read as a model or mask of a run: {error}") from error
    shapes = {entry.name: entry.shape for entry in layout.entries}
    if of != layout.fingerprint or {n: tuple(t.shape) for n, t in tensors.items()} != shapes:
        raise ConfigError(
            f"{path}: holds another network: its layout is {of}, expected {layout.fingerprint}. The configuration, the "
            "package's version or the base under the adapters is not that of the run"
        )
    if any(tensor.dtype != dtype for tensor in tensors.values()):
        raise ConfigError(f"{path}: expected tensors of {dtype}")
    return tensors


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Whole and on the disk, or not at all."""
    with replacing(path) as part:
        part.write_text(json.dumps(content, indent=2, sort_keys=False) + "\n")
