"""The last lines and the tables of a finished run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.cli.summary import describe_contributions, find_absent, show_result
from flare_sparse.results.runs.progress import format_progress
from flare_sparse.results.runs.results import RunResult

ROUNDS = {"asked": 3, "contributed": 3, "missed": {}}


def build_run(
    out: Path, contributions: dict[str, Any], figures: dict[str, Any], last: dict[str, Any] | None = None, **others: Any
) -> RunResult:
    sites = sorted({*contributions, *figures})
    traffic = dict.fromkeys(("payload_bytes", "dense_bytes", "floor_bytes", "messages"), 0)
    summary = {
        "name": "brains", "method": "fedavg", "note": "", "rounds": 3, "seconds": 1.0, "model_sha256": "0" * 64,
        "metric": {"name": "mae", "unit": "years"}, "best": {"round": -1}, "sites": sites,
        "final": {"sites": figures, "metrics": {"mae": 1.0, "test_examples": 4.0}},
        "traffic": {"down": traffic, "up": traffic}, "contributions": contributions, **others,
    }  # fmt: skip
    return RunResult("brains", out, summary, [last] if last else [], [])


def test_contributions_name_every_site_with_rounds_and_reasons(tmp_path: Path) -> None:
    run = build_run(
        tmp_path,
        {
            "site-1": ROUNDS,
            "site-2": {"asked": 2, "contributed": 0, "missed": {"quarantined": 1, "E_DATA": 2}},
            "site-3": {"asked": 3, "contributed": 1, "missed": {"timed_out": 2}},
            "target": {"asked": 0, "contributed": 0, "missed": {}},
        },
        {},
    )
    first, warning = describe_contributions(run)
    assert first == (
        "contributed: site-1 3/3, site-2 0/3 (2 x E_DATA, 1 x quarantined), site-3 1/3 (2 x timed out), "
        "target (never asked)"
    )
    assert "trained without site-2: " in warning
    assert "site_error.txt and the log at the site give the reason" in warning
    assert run.idle_sites == ["site-2"]


@pytest.mark.parametrize("name", ["site_errors/site-2.txt", "workspace/brains/site-2/simulate_job/site_error.txt"])
def test_warning_names_the_report_of_a_site_on_this_machine(tmp_path: Path, name: str) -> None:
    missed = {"asked": 3, "contributed": 0, "missed": {"E_DATA": 3}}
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text("E_DATA: no such file")
    warning = describe_contributions(build_run(tmp_path, {"site-1": ROUNDS, "site-2": missed}, {}))[-1]
    assert f"The reason is in {tmp_path / name};" in warning


def test_events_are_shown_before_the_warning(tmp_path: Path) -> None:
    event = {"round": 2, "site": "site-1", "event": "checkpoint_damaged", "detail": "checkpoint 2 is damaged"}
    lines = describe_contributions(build_run(tmp_path, {"site-1": ROUNDS}, {"site-1": {"mae": 1.0}}, events=[event]))
    assert lines == ["contributed: site-1 3/3", "note: round 2, site-1: checkpoint 2 is damaged"]


def test_sites_without_a_figure_of_the_final_model_keep_their_row_and_its_reason(tmp_path: Path) -> None:
    names = ("site-1", "site-2", "site-3", "site-4", "site-5")
    figures = {"site-1": {"mae": 1.25, "test_examples": 4.0}, "site-6": {"test_examples": 0.0}}
    last = {
        "sites_contributed": ["site-1", "site-2"],
        "timed_out": ["site-3"],
        "rejected": {"site-4": "E_FINITE"},
        "excluded": {"site-5": "E_HELLO: site 'site-5' is excluded: ..."},
    }
    absent = find_absent(build_run(tmp_path, dict.fromkeys(names, ROUNDS), figures, last))
    assert absent == {
        "site-2": "no test examples", "site-3": "did not reply", "site-4": "E_FINITE", "site-5": "E_HELLO"
    }  # fmt: skip
    run = build_run(tmp_path, dict.fromkeys(names, ROUNDS), figures, {"sites_contributed": ["site-1", "site-2"]})
    rows = [line.split("│")[1:4] for line in show(run).splitlines() if line.startswith("│ site-")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["site-1", "1.250", "4"],
        ["site-2", "-", "no test examples"],
        ["site-6", "-", "no test examples"],
    ]


def test_names_are_not_cut_at_80_columns_nor_read_as_markup(tmp_path: Path) -> None:
    site = "a-[red]hospital[/red]-with-a-long-name-" * 3
    text = show(build_run(tmp_path, {site: ROUNDS}, {site: {"mae": 1.0, "test_examples": 4.0}}))
    cells = [line.split("│")[1].strip() for line in text.splitlines() if line.startswith("│")]
    assert site in "".join(cells)
    assert "…" not in text


def show(run: RunResult) -> str:
    screen = io.StringIO()
    show_result(Console(file=screen, width=80, soft_wrap=True), run)
    return screen.getvalue()


def test_round_names_every_site_without_a_contribution_and_its_reason() -> None:
    line = {
        "round": 2, "rounds": 3, "kind": "train", "sites_contributed": ["site-1"], "sites_asked": ["site-1", "site-2"],
        "metrics": {}, "metric": "mae", "unit": "", "bytes_up": 1, "bytes_down": 1, "dense_bytes": 0, "seconds": 1.0,
        "rejected": {"site-2": "E_DATA"}, "timed_out": ["site-3"], "quarantined": ["site-4"],
        "excluded": {"site-5": "E_CAP: site 'site-5' is excluded: ..."},
    }  # fmt: skip
    assert format_progress(line).endswith(
        "rejected: site-2 E_DATA  excluded: site-5 E_CAP  did not reply: site-3  in quarantine: site-4"
    )


def test_setting_names_are_not_cut_at_80_columns() -> None:
    result = CliRunner().invoke(app, ["settings", "metagater"], env={"COLUMNS": "80", "TERM": "dumb"})
    assert "method.training.batch_size " in result.output
    assert "…" not in result.output
