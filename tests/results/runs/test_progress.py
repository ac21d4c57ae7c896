"""Progress of a run: the time left, the words for the ratio to dense FedAvg, and files that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.results.runs.progress import (
    append_round,
    compare_with_dense,
    estimate_seconds_left,
    format_next,
)
from flare_sparse.results.runs.record import ROUNDS, GrowingRecord


def line(number: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "run": "0" * 16, "round": number, "rounds": 40, "kind": "train", "sites_asked": ["a"],
        "sites_contributed": ["a"], "metric": "mae", "metrics": {"mae": 4.0}, "unit": "years", "bytes_up": 500,
        "bytes_down": 500, "dense_bytes": 900, "seconds": seconds, "rejected": {}, "timed_out": [], **more,
    }  # fmt: skip


def test_round_shows_the_time_left_and_says_that_more_than_dense_was_sent() -> None:
    seen: list[Any] = []
    assert format_next(seen, line(1, 6.0)) == (
        "round 1/40  1/1 sites  mae 4.000 years  1.0 kB (1.1x more than dense)  6.0 s  3 min 54 s left"
    )
    assert "left" not in format_next(seen, line(39, 0.1))


@pytest.mark.parametrize(("sent", "dense", "words"), [
    (100, 94, "1.1x more than dense"), (100, 96, "as much as dense"), (100, 1000, "10.0x less than dense"),
])  # fmt: skip
def test_ratio_never_calls_more_less(sent: float, dense: float, words: str) -> None:
    assert compare_with_dense(sent, dense) == words


def test_growing_file_starts_empty_and_holds_whole_lines(tmp_path: Path) -> None:
    (tmp_path / ROUNDS).write_text('{"round": 1}\n')
    (tmp_path / "summary.json").write_text("{}")
    record = GrowingRecord(tmp_path)
    assert (tmp_path / ROUNDS).read_text() == ""
    assert not (tmp_path / "summary.json").exists()
    record.append([{"round": 1}, {"round": 2}])
    record.append([])
    assert record.count == 2
    assert [json.loads(text) for text in (tmp_path / ROUNDS).read_text().splitlines()] == [{"round": 1}, {"round": 2}]


def build_lines(*seconds: float, rounds: int = 12) -> list[dict[str, Any]]:
    return [{"round": i, "rounds": rounds, "seconds": s, "events": []} for i, s in enumerate(seconds, 1)]


@pytest.mark.parametrize(
    ("seconds", "left"),
    [
        ((), None),
        ((40.0,), 11 * 40.0),
        # The first round, in which libraries are loaded, no longer counts.
        ((40.0, 2.0), 10 * 2.0),
        ((40.0, 2.0, 4.0), 9 * 3.0),
        ((40.0, *[2.0] * 11), 0.0),
    ],
)
def test_time_left_extends_the_recent_rounds_without_the_first(seconds: tuple[float, ...], left: float | None) -> None:
    assert estimate_seconds_left(build_lines(*seconds)) == left


def test_time_left_adds_up_the_requests_of_a_round() -> None:
    lines = build_lines(40.0, 2.0)
    assert estimate_seconds_left([*lines, {**lines[-1], "kind": "count"}]) == 10 * 4.0


def test_rounds_that_a_run_steps_back_from_are_removed() -> None:
    lines: list[Any] = build_lines(1.0, 1.0, 1.0)
    again = {**lines[1], "events": [{"event": "checkpoint_damaged"}, {"event": "stepped_back"}]}
    append_round(lines, again)
    assert lines == [lines[0], again]
