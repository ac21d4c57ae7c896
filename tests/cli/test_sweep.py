"""``flare-sparse sweep``: runs of a grid, kept when it continues, and the configuration that won."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from flare_sparse.api import sweep
from flare_sparse.api.run import Run
from flare_sparse.api.start import launch
from flare_sparse.cli import app
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import Study

GRID = ("method.training.lr=0.00001,0.03", "--seeds", "2")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    draw = random.Random(0)
    rows = [(draw.gauss(0, 1), draw.gauss(0, 1), "AB"[i % 2]) for i in range(80)]
    (tmp_path / "all.csv").write_text("a,b,site,y\n" + "".join(f"{a},{b},{site},{a - b}\n" for a, b, site in rows))
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: grid\nseed: 4\nmethod: {name: fedavg, rounds: 2}\n"
        "task: {name: table, kind: regression, target: y, features: [a, b], split: {validation: 0.2}}\n"
        f"simulator: {{data: {{path: {tmp_path}/all.csv, partition: {{kind: natural, column: site}}}}}}\n"
    )
    return file


def call(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


@pytest.mark.slow
def test_winner_by_validation_becomes_a_configuration_and_finished_runs_are_kept(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    result = call(job, *GRID, "--out", out)
    assert result.exit_code == 0, result.output
    record = json.loads((out / "sweep.json").read_text())
    assert [row["settings"] for row in record["results"]] == [
        ["method.training.lr=0.03"], ["method.training.lr=0.00001"]
    ]  # fmt: skip
    summaries = {path.parent: json.loads(path.read_text()) for path in out.glob("*/summary.json")}
    assert sorted(summary["seed"] for summary in summaries.values()) == [4, 4, 5, 5]
    first = next(s for s in summaries.values() if s["seed"] == 4)
    values = {row["settings"][0]: row["validation"] for row in record["results"]}
    assert first["final"]["metrics"]["validation_mae"] in [value["4"] for value in values.values()]
    winner = load_config(out / "best.yaml")
    assert (winner.method.config.training.lr, winner.seed) == (0.03, 4)
    assert (out / "best.yaml").read_text().startswith("# Settings that won sweep of 2 settings with 2 seeds: method.")
    assert (out / "sweep.png").stat().st_size > 1000
    lost = min(summaries)
    shutil.rmtree(lost)
    written = {path: (path / "summary.json").stat().st_mtime_ns for path in summaries if path != lost}
    again = call(job, *GRID, "--out", out)
    assert "4 runs, 3 of them finished" in again.output
    assert (lost / "summary.json").is_file()
    assert {path: (path / "summary.json").stat().st_mtime_ns for path in written} == written
    assert json.loads((out / "sweep.json").read_text())["results"] == record["results"]
    shown = json.loads(call(job, *GRID, "--out", out, "--json").stdout)
    assert shown == json.loads((out / "sweep.json").read_text())
    other = call(job, *GRID, "--out", out, "--set", "method.rounds=1")
    assert other.exit_code == 2
    assert "holds a run of other settings than this sweep" in other.output


@pytest.mark.slow
def test_setting_that_diverges_is_named_and_ranked_last(job: Path, tmp_path: Path) -> None:
    out, optimizer = tmp_path / "sweep", ("--set", "method.training.optimizer=sgd")
    command = (job, "method.training.lr=1e20,0.03", "--seeds", "1", "--out", out, *optimizer)
    result = call(*command)
    assert result.exit_code == 0, result.output
    assert "lr=1e20, seed 4 failed: E_QUORUM: round " in result.output
    record = json.loads((out / "sweep.json").read_text())
    best, failed = record["results"]
    assert (best["settings"], best["failed"]) == (["method.training.lr=0.03"], {})
    assert (failed["settings"], failed["mean"], failed["validation"]) == (["method.training.lr=1e20"], None, {})
    assert failed["failed"]["4"].startswith("E_QUORUM: round ")
    assert load_config(out / "best.yaml").method.config.training.lr == 0.03
    again = call(*command)
    assert "2 runs, 1 of them finished" in again.output
    assert "lr=1e20, seed 4 failed" in again.output
    changed = call(*command, "--set", "method.training.clip_norm=1")
    assert changed.exit_code == 2
    assert "holds a run of other settings than this sweep" in changed.output
    alone = call(job, "method.training.lr=1e20", "--seeds", "1", "--out", tmp_path / "alone", *optimizer)
    assert alone.exit_code == 2
    assert "no run of the sweep finished; lr=1e20, seed 4: E_QUORUM: round " in alone.output


@pytest.mark.slow
def test_run_that_the_machine_fails_is_tried_again(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(env: str, study: Study, *arguments: Any) -> Run:
        if study.config.method.config.training.lr == 0.03:
            raise RuntimeError("not enough memory")
        return launch(env, study, *arguments)

    command = (job, "method.training.lr=0.03,0.01", "--seeds", "1", "--out", tmp_path / "sweep")
    with monkeypatch.context() as patched:
        patched.setattr(sweep, "launch", fail)
        result = call(*command)
    assert (result.exit_code, "lr=0.03, seed 4 failed: RuntimeError: not enough memory" in result.output) == (0, True)
    again = call(*command)
    assert "2 runs, 1 of them finished" in again.output
    assert "failed" not in again.output


def test_sweep_needs_validation_examples_and_valid_settings(job: Path, tmp_path: Path) -> None:
    result = call(job, *GRID, "--set", "task.split.validation=0", "--out", tmp_path / "x")
    assert result.exit_code == 2
    assert "sweep chooses on validation examples, but task.split.validation is 0" in result.output
    result = call(job, "method.training.lr=0.1,-1", "--out", tmp_path / "x")
    assert result.exit_code == 2
    assert "method.training.lr" in result.output
    names = {file.name for file in (tmp_path / "x").iterdir()}
    assert names == {".lock"}, "all are checked before the first run"


@pytest.mark.slow
def test_method_of_the_users_is_compared_with_a_published_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["init", "method"]).exit_code == 0
    own = "random_masks.RandomMasks"
    settings = ("--seeds", "1", "--set", "task.split.validation=0.2", "--set", "method.rounds=1")
    result = call("study.yaml", f"method.name=fedavg,{own}", "method.density=0.25,0.5", *settings)
    assert result.exit_code == 0, result.output
    record = json.loads(Path("runs/study-sweep/sweep.json").read_text())
    assert {row["method"] for row in record["methods"]} == {"fedavg", own}
    # FedAvg has no density, and one run.
    assert sorted(len(row["settings"]) for row in record["results"]) == [1, 2, 2]
    assert load_config(Path("study.yaml"), ["method.name=fedavg"]).method.name == "fedavg"
    assert load_config(Path("study.yaml"), [f"method.name={own}"]).method.name == own
