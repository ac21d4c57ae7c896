"""``flare-sparse site log``: what servers asked of a site, from the site's own records."""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.cli.watch import follow_site
from flare_sparse.core.exchange import RequestId
from flare_sparse.core.steps import STEP_FILE
from flare_sparse.flare.running import RUNNING_FOLDER
from flare_sparse.rounds.endpoints.request_log import RequestLog

RUN = "00112233445566ff"
MODELS = [f"{number:064x}" for number in range(4)]


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit whose site answered three requests of one job: the first twice, the second with two models."""
    (tmp_path / "local").mkdir()
    file = tmp_path / "flare_sparse_requests" / "site-1" / f"brain-age-{RUN}.json"
    log = RequestLog(RUN, lambda kind, t: 1, attempts=2, file=file)
    train = [RequestId("train", 1), RequestId("train", 1), RequestId("train", 2), RequestId("train", 2)]
    for request, model in zip(train, (0, 0, 1, 2), strict=True):
        log.admit(request, MODELS[model])
    log.admit(RequestId("evaluate", 3), MODELS[3])
    log.release_metrics(RequestId("evaluate", 3), MODELS[3], None, None)
    return tmp_path


def test_requests_are_counted_by_kind_with_the_digest_of_every_model(kit: Path) -> None:
    result = CliRunner().invoke(app, ["site", "log", str(kit), "--json"])
    (run,) = json.loads(result.stdout)["requests"]
    assert (run["site"], run["job"], run["run"]) == ("site-1", "brain-age", RUN)
    assert [request["kind"] for request in run["requests"]] == ["train", "train", "train", "evaluate"]
    assert [request["answers"] for request in run["requests"]] == [2, 1, 1, 1]
    assert len(run["questions"]) == 1
    assert [request["digest"] for request in run["requests"]] == MODELS


def test_terminal_names_the_run_the_counts_and_the_last_model(kit: Path) -> None:
    result = CliRunner().invoke(app, ["site", "log", str(kit)])
    assert result.exit_code == 0
    assert f"brain-age (run {RUN}), site-1: " in result.output
    assert "requests: 3 train, 1 evaluate; last round 3; 5 answers with retries" in result.output
    assert "more than one model in: train 2" in result.output
    assert f"last model (evaluate, round 3): sha256 {MODELS[3]}" in result.output


def test_site_without_a_record_was_asked_nothing(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    assert "no request" in CliRunner().invoke(app, ["site", "log", str(tmp_path)]).output
    assert json.loads(CliRunner().invoke(app, ["site", "log", str(tmp_path), "--json"]).stdout) == {
        "requests": [],
        "egress": {},
    }


def test_damaged_record_is_an_error_that_names_the_file(kit: Path) -> None:
    (file,) = (kit / "flare_sparse_requests").glob("*/*.json")
    file.write_text("{")
    result = CliRunner().invoke(app, ["site", "log", str(kit)])
    assert result.exit_code != 0
    assert file.name in (result.output + str(result.exception)).replace("\n", "")


def test_a_site_watches_its_own_requests_and_training(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates, held = follow_site(kit), list[int]()
    assert next(updates) == [{"now": f"brain-age (run {RUN}): 4 models, to round 3"}]

    def train(_: float) -> None:
        lock = kit / RUNNING_FOLDER / "site-1" / "job.json"
        for folder in (lock.parent, kit / "job", kit / "ended"):
            folder.mkdir(parents=True)
        lock.write_text('{"job": "job", "process": 1, "checkpoints": null}')
        held.append(os.open(lock, os.O_RDWR))
        fcntl.flock(held[0], fcntl.LOCK_EX)
        line = {"site": "site-1", "round": 4, "step": 7, "steps": 20, "epochs": 1}
        (kit / "job" / STEP_FILE).write_text(json.dumps(line))
        # Of a job whose process is gone.
        (kit / "ended" / STEP_FILE).write_text(json.dumps({**line, "round": 20}))

    monkeypatch.setattr(time, "sleep", train)
    assert next(updates)[1:] == [{"now": "site-1: round 4, step 7 of 20"}]
    os.close(held[0])
