"""Progress of a run: the time left, the words for the ratio to dense FedAvg, and files that grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.runs.growing import LEDGER, ROUNDS, GrowingRecord
from flare_sparse.runs.progress import ProgressFormatter, compare_with_dense, estimate_seconds_left


def line(number: int, seconds: float, **more: Any) -> dict[str, Any]:
    return {
        "run": "0" * 16, "round": number, "rounds": 40, "kind": "train", "sites_asked": ["a"],
        "sites_contributed": ["a"], "metric": "mae", "metrics": {"mae": 4.0}, "unit": "years", "bytes_up": 500,
        "bytes_down": 500, "dense_bytes": 900, "seconds": seconds, "rejected": {}, "timed_out": [], **more,
    }  # fmt: skip


def test_time_left_extends_the_last_ten_rounds() -> None:
    rounds = [line(0, 100.0, kind="score")]
    assert estimate_seconds_left([]) is None
    assert estimate_seconds_left(rounds) is None
    rounds += [line(1, 60.0), line(2, 20.0)]
    assert estimate_seconds_left(rounds) == 38 * 40
    rounds += [line(number, 2.0) for number in range(3, 21)]
    assert estimate_seconds_left(rounds) == 20 * 2
    # A second request of the round, such as a count of zeros, belongs to its duration.
    assert estimate_seconds_left([*rounds, line(20, 3.0, kind="count")]) == pytest.approx(20 * 2.3)
    assert estimate_seconds_left([*rounds, line(41, 1.0, kind="evaluate")]) == 0


def test_round_shows_the_time_left_and_says_that_more_than_dense_was_sent() -> None:
    formatter = ProgressFormatter()
    assert formatter.format(line(1, 6.0)) == (
        "round 1/40  1/1 sites  mae 4.000 years  1.0 kB (1.1x more than dense)  6.0 s  3 min 54 s left"
    )
    assert "left" not in formatter.format(line(39, 0.1))


@pytest.mark.parametrize(("sent", "dense", "words"), [
    (100, 94, "1.1x more than dense"), (100, 96, "as much as dense"), (100, 1000, "10.0x less than dense"),
])  # fmt: skip
def test_ratio_never_calls_more_less(sent: float, dense: float, words: str) -> None:
    assert compare_with_dense(sent, dense) == words


def test_growing_files_start_empty_and_hold_whole_lines(tmp_path: Path) -> None:
    (tmp_path / ROUNDS).write_text('{"round": 1}\n')
    (tmp_path / "summary.json").write_text("{}")
    record = GrowingRecord(tmp_path)
    assert (tmp_path / ROUNDS).read_text() == ""
    assert not (tmp_path / "summary.json").exists()
    record.append(ROUNDS, [{"round": 1}, {"round": 2}])
    record.append(ROUNDS, [])
    assert (record.get_count(ROUNDS), record.get_count(LEDGER)) == (2, 0)
    assert [json.loads(text) for text in (tmp_path / ROUNDS).read_text().splitlines()] == [{"round": 1}, {"round": 2}]
