"""What a FLARE job with a sparse exchange sent, by site and by round, beside FLARE's metrics."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ...wire.ledger import EXCHANGE_FILE
from .received import parse_record
from .record import CONFIG

_SIMULATED = "simulate_job"
"""Name of the job's folder of each participant of FLARE's simulator."""
_FIELDS = {"round": int, "site": str, "direction": str, "payload_bytes": int, "dense_bytes": int}


@dataclass(frozen=True)
class Traffic:
    """Messages in one direction, in total: their number, their bytes, and those of the same models as plain float32."""

    messages: int = 0
    sent: int = 0
    dense: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.sent + other.sent, self.dense + other.dense)


@dataclass(frozen=True)
class JobExchange:
    """The messages of one job.

    Attributes:
        name: of the job, as far as its folder tells it.
        sites: traffic by site and direction: ``down`` to the site, ``up`` from it.
        rounds: traffic by FLARE's 0-based round and direction.
        metrics: FLARE's aggregated metrics by round; empty where the job has none.
    """

    name: str
    sites: dict[str, dict[str, Traffic]]
    rounds: dict[int, dict[str, Traffic]]
    metrics: dict[int, dict[str, float]]

    @property
    def total(self) -> Traffic:
        """All messages."""
        return sum((part for site in self.sites.values() for part in site.values()), Traffic())

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {"total": asdict(self.total), **asdict(self)}


def has_exchanges(folder: Path) -> bool:
    """Return whether a folder holds jobs with a sparse exchange, and is no result folder of this package."""
    return not (folder / CONFIG).is_file() and next(folder.rglob(EXCHANGE_FILE), None) is not None


def read_exchanges(folder: Path) -> list[JobExchange]:
    """Read the jobs in a workspace of FLARE, or in a downloaded job.

    Raises:
        ConfigError: a ledger is malformed; the text names file and line.
    """
    jobs: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob(EXCHANGE_FILE)):
        # Each participant of the simulator has a folder of the job; elsewhere the ledgers name the job.
        place = str(file.parents[2]) if file.parent.name == _SIMULATED else str(_read_lines(file)[0].get("run"))
        jobs.setdefault(place, []).append(file)
    return [_read_job(folder, files) for files in jobs.values()]


def _read_job(folder: Path, files: list[Path]) -> JobExchange:
    sites: dict[str, dict[str, Traffic]] = {}
    rounds: dict[int, dict[str, Traffic]] = {}
    for key, count in _count_messages(files).items():
        line = json.loads(key)
        traffic = Traffic(count, count * line["payload_bytes"], count * line["dense_bytes"])
        for table, row in ((sites, line["site"]), (rounds, line["round"])):
            cell: dict[str, Traffic] = table.setdefault(row, {})
            cell[line["direction"]] = cell.get(line["direction"], Traffic()) + traffic
    metrics = {number: found for file in files for number, found in _read_metrics(file.parent / "metrics").items()}
    return JobExchange(_find_name(folder, files), dict(sorted(sites.items())), dict(sorted(rounds.items())), metrics)


def _count_messages(files: Iterable[Path]) -> Counter[str]:
    """Return how often each message was sent: both its ends have recorded it, if both ledgers are here."""
    counts: Counter[str] = Counter()
    for file in files:
        counts |= Counter(json.dumps(line, sort_keys=True) for line in map(_identify, _read_lines(file)))
    return counts


def _identify(line: dict[str, Any]) -> dict[str, Any]:
    """Return what is equal in the ledgers of both ends."""
    return {name: line[name] for name in (*_FIELDS, "sequence", "kind") if name in line}


def _read_lines(file: Path) -> list[dict[str, Any]]:
    lines = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            line = parse_record(text)
            found = {name: type(line[name]) for name in _FIELDS}
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{file}, line {number}: no line of a ledger: {error!r}") from error
        if found != _FIELDS or line["direction"] not in ("down", "up"):
            raise ConfigError(f"{file}, line {number}: expected {', '.join(_FIELDS)}, found {text[:120]}")
        lines.append(line)
    if not lines:
        raise ConfigError(f"{file}: empty; the job has coded no message")
    return lines


def _read_metrics(folder: Path) -> dict[int, dict[str, float]]:
    """Return FLARE's aggregated metrics by round; empty where it has written none."""
    file = folder / "round_metrics.jsonl"
    if not file.is_file():
        return {}
    try:
        lines = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
        return {
            int(line["round"]): {str(m["name"]): float(m["value"]) for m in line["aggregated_metrics"]}
            for line in lines
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: no round metrics of FLARE: {error!r}") from error


def _find_name(folder: Path, files: list[Path]) -> str:
    """Return FLARE's name of the job, else that of its folder."""
    for file in files:
        summary = file.parent / "metrics" / "metrics_summary.json"
        if summary.is_file():
            try:
                return str(parse_record(summary.read_text(encoding="utf-8"))["job_name"])
            except (ValueError, KeyError, TypeError):
                continue
    return files[0].parents[2].name if files[0].parent.name == _SIMULATED else folder.resolve().name
