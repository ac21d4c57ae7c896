"""``flare-sparse watch``: rounds of a run whose files grow, are written again or lose rounds."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from line import call
from rich.console import Console

from flare_sparse.cli.watch import (
    REFRESH_S,
    SHOWN_ROUNDS,
    build_sites_table,
    build_table,
    follow_folder,
    serve_page,
    show_updates,
)
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.steps import STEP_FILE
from flare_sparse.results.runs.progress import find_training

HOSTILE = "<script>alert(1)</script>"


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
    looks = [[entry["round"] for entry in new] for new in follow_folder(tmp_path)]
    assert looks == [[], [1], [1, 2, 3]]


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no result folder"):
        next(follow_folder(tmp_path / "none"))
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds no run; give the folder of --out"):
        next(follow_folder(tmp_path))


def test_start_of_a_run_is_waited_for_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert next(follow_folder(tmp_path)) == []
    assert "waiting for a run to start in" in capsys.readouterr().out


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


def build_line(number: int, *events: str, committed_at: float = 0.0) -> dict[str, Any]:
    return {
        "run": "0" * 16, "kind": "train", "round": number, "rounds": 4, "metric": "mae", "unit": "years",
        "metrics": {"mae": float(number)}, "bytes_up": 500, "bytes_down": 500, "dense_bytes": 2000, "seconds": 1.0,
        "sites_asked": ["site-1"], "sites_contributed": ["site-1"], "rejected": {}, "timed_out": [],
        "committed_at": committed_at, "events": [{"event": event} for event in events],
    }  # fmt: skip


def write_rounds(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def list_shown_rounds(updates: Any) -> list[str]:
    screen = io.StringIO()
    show_updates(Console(file=screen, width=200), updates)
    return [line.split("  ")[0] for line in screen.getvalue().splitlines()]


def test_watch_shows_each_round_once_while_the_file_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = build_line(1), build_line(2), build_line(3)
    repeated = build_line(2, "stepped_back", committed_at=9.0)
    # A resumed run empties the file and writes its rounds again; a run that steps back replaces the last ones.
    looks = [[first, second], [], [first], [first, second, third], [first], [first, repeated], [first, repeated, third]]

    def write_next(_seconds: float) -> None:
        write_rounds(tmp_path, *looks.pop(0))
        if not looks:
            (tmp_path / "summary.json").write_text("{}")

    monkeypatch.setattr(time, "sleep", write_next)
    shown = list_shown_rounds(follow_folder(tmp_path))
    assert shown == ["round 1/4", "round 2/4", "round 3/4", "round 2/4", "round 3/4"]


def test_line_that_is_written_in_part_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    text = json.dumps(build_line(1)) + "\n"
    (tmp_path / "rounds.jsonl").write_text(text + text[:40])
    assert next(follow_folder(tmp_path)) == [build_line(1)]


def test_table_sums_the_bytes_of_all_rounds_and_estimates_the_time_left() -> None:
    table = build_table([build_line(1), build_line(2)])
    assert str(table.caption) == "2.0 kB in total, 2.0x less than dense, about 2 s left"


def test_page_is_served_to_this_machine_under_its_own_names(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    with serve_page(page, 0) as address:
        host, port = address.removeprefix("http://").split(":")
        assert host == "127.0.0.1"

        def get(name: str) -> tuple[int, bytes]:
            connection = HTTPConnection(host, int(port))
            connection.request("GET", "/any", headers={"Host": name})
            answer = connection.getresponse()
            return answer.status, answer.read()

        assert get("localhost:1") == (404, b"")
        page.write_text("rounds")
        assert get(f"127.0.0.1:{port}") == get("localhost") == (200, b"rounds")
        assert get("attacker.example") == (404, b"")
        with pytest.raises(ConfigError, match=f"--page {port}: .*choose another port"), serve_page(page, int(port)):
            pass
        with pytest.raises(ConfigError, match=r"--page -1: .*port must be 0-65535"), serve_page(page, -1):
            pass
    # An error of the block ends the server, and does not wait for it.
    with pytest.raises(KeyError), serve_page(page, 0):
        raise KeyError


def test_page_shows_the_table_and_loads_itself_again_until_the_run_has_ended(tmp_path: Path) -> None:
    page, hostile = tmp_path / "page.html", {**line(2), "sites_asked": ["a", HOSTILE]}
    console, found = Console(file=io.StringIO()), list[str]()

    def give_updates() -> Iterator[list[Any]]:
        yield [line(1)]
        found.append(page.read_text())
        yield [line(1), hostile]

    show_updates(console, give_updates(), page=page)
    reload = f'<meta http-equiv="refresh" content="{REFRESH_S}">'
    assert reload in found[0]
    assert "5.000" in found[0]
    assert reload not in page.read_text()
    assert "6.000" in page.read_text()
    assert HOSTILE not in page.read_text()
    assert "alert(1)" in page.read_text()


def test_sites_are_shown_with_what_they_sent_and_why_they_are_missing() -> None:
    refused = {**line(2), "sites_asked": ["a", HOSTILE], "rejected": {HOSTILE: "E_NORM: 17.3 of the patient"}}
    late = {**line(1), "timed_out": ["b"]}
    lines = [late, {**refused, "site_metrics": {"a": {"mae": 2.5}}, "spent_epsilon": {"a": 0.75}}]
    console = Console(file=io.StringIO(), width=100)
    console.print(build_sites_table(lines))
    rows = [[cell.strip() for cell in text.strip("│ ").split("│")] for text in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["a", "2 of 2", "2.500", "0.75", "answered"] in rows
    assert ["b", "0 of 1", "-", "-", "did not reply in time"] in rows
    assert [HOSTILE, "0 of 1", "-", "-", "E_NORM"] in rows


def test_sites_within_a_round_are_shown_in_the_table(tmp_path: Path) -> None:
    for place, site, number in (
        ("progress/a", "a", 4),
        ("workspace/job/b/simulate_job", "b[/]", 3),
        ("progress/c", "c", 5),
    ):
        (tmp_path / place).mkdir(parents=True)
        text = json.dumps({"site": site, "round": number, "step": 7, "steps": 20, "epochs": 1})
        (tmp_path / place / STEP_FILE).write_text(text)
    assert find_training(tmp_path, 3) == ["a: round 4, step 7 of 20", "c: round 5, step 7 of 20"]
    now = find_training(tmp_path, 2)
    console = Console(file=io.StringIO(), width=100)
    console.print(build_table([line(3)], now))
    assert "b(/): round 3, step 7 of 20" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", ["", ".", "missing/page.html"])
def test_page_that_cannot_be_written_does_not_blame_the_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("watch", tmp_path, "--page", page)
    assert result.exit_code == 2
    assert f"--page {page}: expected a file in a folder that exists, or a port" in result.output
    assert "damaged" not in result.output


@pytest.mark.parametrize("record", ["3", "[]", '{"round": NaN}'])
def test_json_of_a_record_that_is_no_json_object_is_refused(record: str, tmp_path: Path) -> None:
    (tmp_path / "rounds.jsonl").write_text(record + "\n")
    (tmp_path / "summary.json").write_text("{}")
    result = call("--json", "watch", str(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "the folder is damaged or was changed" in result.stderr
