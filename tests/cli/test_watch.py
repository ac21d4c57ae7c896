"""``flare-sparse watch``: what it shows of a run that grows, and when it ends."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flare_sparse.cli.watch import SHOWN_ROUNDS, build_table, follow_folder, show_updates
from flare_sparse.errors import ConfigError


def line(number: int) -> dict[str, Any]:
    return {
        "run": "ab" * 8, "round": number, "rounds": 30, "kind": "train", "sites_asked": ["a", "b"],
        "sites_contributed": ["a"], "metric": "mae", "metrics": {"mae": 4.0 + number}, "unit": "years",
        "bytes_up": 1500, "bytes_down": 500, "dense_bytes": 8000, "seconds": 3.0, "rejected": {}, "timed_out": [],
    }  # fmt: skip


def draw(lines: list[dict[str, Any]]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(build_table(lines))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_folder_is_followed_to_the_end_of_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = tmp_path / "rounds.jsonl"
    text = "".join(json.dumps(line(number)) + "\n" for number in (1, 2, 3))
    half = len(text) // 2

    def write(_: float, parts: Iterator[str] = iter([text[:half], text[half:]])) -> None:
        with rounds.open("a") as file:
            file.write(next(parts))
        if rounds.read_text() == text:
            (tmp_path / "summary.json").write_text("{}")

    monkeypatch.setattr(time, "sleep", write)
    looks = [[entry["round"] for entry in new] for new in follow_folder(tmp_path, 1.0)]
    assert looks == [[], [1], [2, 3]]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no result folder"):
        next(follow_folder(tmp_path / "none", 1.0))


def test_table_shows_the_last_rounds_the_total_and_the_time_left() -> None:
    text = draw([line(number) for number in range(1, 21)])
    assert "run abababababababab: mae (years)" in text
    assert "20/30" in text
    assert f"{20 - SHOWN_ROUNDS + 1}/30" in text
    assert f" {20 - SHOWN_ROUNDS}/30" not in text
    assert "24.000" in text
    assert "40.0 kB in total, 4.0x less than dense, about 30 s left" in " ".join(text.split())


def test_table_waits_for_the_first_round_and_ends() -> None:
    assert "waiting for the first round" in draw([])
    assert "all rounds done" in draw([{**line(31), "kind": "evaluate"}])


def test_plain_lines_where_the_output_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=200)
    show_updates(console, iter([[line(1)], [], [line(2)]]))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [text.split("  ")[0] for text in shown] == ["round 1/30", "round 2/30"]
    assert shown[1].endswith("1 min 24 s left")
