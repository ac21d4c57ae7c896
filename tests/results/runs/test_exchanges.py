"""The bytes of FLARE jobs with a sparse exchange, from the ledgers in their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.runs.exchanges import Traffic, has_exchanges, read_exchanges


def build_line(site: str, round_: int, direction: str, payload: int, run: str = "a") -> dict[str, Any]:
    return {
        "run": run, "round": round_, "sequence": 7, "site": site, "direction": direction, "kind": "model",
        "payload_bytes": payload, "dense_bytes": 1000, "floor_bytes": payload - 1,
    }  # fmt: skip


SITES = ("site-1", "site-2")
LINES = [
    build_line(site, round_, direction, 10 * (round_ + 1) if direction == "up" else 500)
    for round_ in (0, 1)
    for direction in ("down", "up")
    for site in SITES
]


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    (folder / "sparse_exchange.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_metrics(folder: Path) -> None:
    (folder / "metrics").mkdir()
    rows = [{"round": n, "aggregated_metrics": [{"name": "mse", "value": 3.0 - n}]} for n in (0, 1)]
    (folder / "metrics" / "round_metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "metrics" / "metrics_summary.json").write_text(json.dumps({"job_name": "study"}))


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace of FLARE's simulator: both ends have recorded each message."""
    job = tmp_path / "workspace" / "folder"
    write(job / "server" / "simulate_job", LINES)
    write_metrics(job / "server" / "simulate_job")
    for site in SITES:
        write(job / site / "simulate_job", [line for line in LINES if line["site"] == site])
    return tmp_path / "workspace"


def test_each_message_counts_once_though_both_ends_have_recorded_it(workspace: Path) -> None:
    (job,) = read_exchanges(workspace)
    assert job.name == "study"
    assert job.sites == {site: {"down": Traffic(2, 1000, 2000), "up": Traffic(2, 30, 2000)} for site in SITES}
    assert job.rounds == {
        0: {"down": Traffic(2, 1000, 2000), "up": Traffic(2, 20, 2000)},
        1: {"down": Traffic(2, 1000, 2000), "up": Traffic(2, 40, 2000)},
    }
    assert job.total == Traffic(8, 2060, 8000)
    assert job.metrics == {0: {"mse": 3.0}, 1: {"mse": 2.0}}


def test_downloaded_job_has_the_ledger_of_the_server_and_repeated_messages_count(tmp_path: Path) -> None:
    write(tmp_path / "job-4711" / "workspace", [*LINES, LINES[0]])
    (job,) = read_exchanges(tmp_path / "job-4711")
    assert (job.name, job.total, job.metrics) == ("job-4711", Traffic(9, 2560, 9000), {})


def test_swarm_has_the_ledgers_of_the_sites_alone(tmp_path: Path) -> None:
    down, up = build_line("site-1", 0, "down", 900), build_line("site-1", 0, "up", 90)
    write(tmp_path / "s" / "site-1" / "simulate_job", [down, up])
    write(tmp_path / "s" / "site-2" / "simulate_job", [up])
    (job,) = read_exchanges(tmp_path)
    assert (job.name, job.sites) == ("s", {"site-1": {"down": Traffic(1, 900, 1000), "up": Traffic(1, 90, 1000)}})


def test_jobs_of_one_folder_are_told_apart(workspace: Path) -> None:
    write(workspace / "kit" / "job-1", [build_line("site-1", 0, "up", 5, "b")])
    write(workspace / "kit" / "job-2", [build_line("site-1", 0, "up", 6, "c")])
    assert [job.total.sent for job in read_exchanges(workspace)] == [2060, 5, 6]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1: no line of a ledger"),
        ('{"round": 1}', "line 1: no line of a ledger: KeyError"),
        (json.dumps({**LINES[0], "payload_bytes": "1"}), "line 1: expected round, site, direction, payload_bytes"),
        (json.dumps({**LINES[0], "direction": "side"}), "line 1: expected round, site"),
        ("", "empty; the job has coded no message"),
    ],
)
def test_malformed_ledger_is_named_with_its_line(text: str, reason: str, tmp_path: Path) -> None:
    write(tmp_path / "job", [])
    (tmp_path / "job" / "sparse_exchange.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_exchanges(tmp_path)


def test_report_prints_sites_rounds_metrics_and_what_was_saved(workspace: Path, tmp_path: Path) -> None:
    assert has_exchanges(workspace)
    shown = CliRunner().invoke(app, ["report", str(workspace)])
    assert shown.exit_code == 0, shown.output
    assert "study: 2.1 kB in 8 messages instead of 8.0 kB, 3.9x less than dense" in shown.output
    assert "mse" in shown.output
    figures = json.loads(CliRunner().invoke(app, ["report", str(workspace), "--json"]).output)["jobs"]
    assert figures[0]["total"] == {"messages": 8, "sent": 2060, "dense": 8000}
    assert figures[0]["rounds"]["1"]["up"]["sent"] == 40


@pytest.mark.parametrize(
    ("words", "reason"), [(["--out", "page"], "leave --out out"), (["empty"], "no sparse_exchange.jsonl below it")]
)
def test_page_of_a_job_and_a_folder_without_one_are_refused(
    words: list[str], reason: str, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    Path("empty").mkdir()
    refused = CliRunner().invoke(app, ["report", "folder", *words])
    assert refused.exit_code == 2
    assert reason in " ".join(refused.output.split())
