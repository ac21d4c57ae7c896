"""The server's figures reach one run of each service, and no failure of it ends a job."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext

from flare_sparse.flare import tracking
from flare_sparse.flare.tracking import FOLDERS, MLFLOW_VARIABLES, RETRY_S, Tracker, collect_figures
from flare_sparse.rounds.federation.records import Evaluation, RoundRecord

FIGURES = {"mae": 2.5, "bytes_up": 200.0}


def track(service: str, folder: Path, rounds: int = 2) -> Tracker:
    """Log the figures of some rounds, and end the job."""
    tracker = Tracker(service, "study", "p98", {"seed": "0"})
    for step in range(1, rounds + 1):
        tracker.log(FIGURES, step, folder)
    tracker.handle_event(EventType.END_RUN, FLContext())
    return tracker


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """MLflow, as far as the tracker uses it: keeps what it is told."""
    for name in (*MLFLOW_VARIABLES, "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    fake: Any = ModuleType("mlflow")
    fake.calls = []

    def keep(name: str) -> Callable[..., None]:
        return lambda *arguments, **settings: fake.calls.append((name, *arguments, *settings.items()))

    for name in ("set_tracking_uri", "set_experiment", "start_run", "log_metrics", "end_run"):
        setattr(fake, name, keep(name))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return fake


def test_figures_of_a_round_are_its_metrics_with_bytes_sites_and_time() -> None:
    lists: dict[str, Any] = {key: [] for key in ("abstained", "timed_out", "quarantined")}
    mappings: dict[str, Any] = {key: {} for key in ("rejected", "excluded", "capped", "clipped")}
    record = RoundRecord(
        kind="train",
        round=4,
        sequence=4,
        sites_asked=["a", "b", "c"],
        sites_contributed=["a", "b"],
        attempts=1,
        evaluated_round=3,
        evaluation=Evaluation(overall={"mae": 2.5}, sites={}),
        bytes_down=300,
        bytes_up=200,
        dense_bytes=900,
        sparsity=0.5,
        seconds=1.5,
        committed_at=0.0,
        **lists,
        **mappings,
    )
    figures = {"mae": 2.5, "bytes_up": 200, "bytes_down": 300, "contributed": 2, "seconds": 1.5}
    assert collect_figures(record) == figures


def test_tensorboard_has_a_file_of_events_in_the_folder_of_the_job(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / FOLDERS["tensorboard"]))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("mae")] == [(1, 2.5), (2, 2.5)]
    assert sorted(events.Tags()["scalars"]) == ["bytes_up", "mae"]


def test_mlflow_has_one_run_in_a_folder_or_at_the_address_of_the_server(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    track("mlflow", tmp_path)
    assert mlflow.calls == [
        ("set_tracking_uri", (tmp_path / FOLDERS["mlflow"]).as_uri()),
        ("set_experiment", "study"),
        ("start_run", ("run_name", "p98"), ("tags", {"seed": "0"})),
        ("log_metrics", FIGURES, 1),
        ("log_metrics", FIGURES, 2),
        ("end_run",),
    ]
    mlflow.calls.clear()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    track("mlflow", tmp_path)
    assert mlflow.calls[:2] == [("set_tracking_uri", "http://mlflow"), ("set_experiment", "ours")]


def test_figures_that_could_not_be_sent_are_sent_later(
    mlflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def fail(*_: Any) -> None:
        sent.append(-1)
        raise ConnectionError("MLflow does not reply")

    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tracking, "time", SimpleNamespace(monotonic=lambda: clock.now))
    mlflow.log_metrics = fail
    tracker = Tracker("mlflow", "study", "p98")
    for step in (1, 2, 3):
        tracker.log(FIGURES, step, tmp_path)
    assert sent == [-1], "one try in a minute"
    tracker._opened = (lambda figures, step: sent.append(step), lambda: sent.append(0))
    clock.now = RETRY_S
    tracker.log(FIGURES, 4, tmp_path)
    assert sent == [-1, 1, 2, 3, 4]
    tracker.handle_event(EventType.END_RUN, FLContext())
    assert sent[-1] == 0


def test_figures_of_a_short_run_are_sent_at_its_end_if_the_service_replies_only_then(
    mlflow: Any, tmp_path: Path
) -> None:
    start_run = mlflow.start_run

    def fail(**_: Any) -> None:
        mlflow.start_run = start_run
        raise ConnectionError("MLflow does not reply")

    mlflow.start_run = fail
    track("mlflow", tmp_path)
    assert mlflow.calls[-3:] == [("log_metrics", FIGURES, 1), ("log_metrics", FIGURES, 2), ("end_run",)]


@pytest.mark.parametrize("service", ["mlflow", "wandb"])
def test_service_whose_package_is_missing_ends_no_job_and_the_log_says_how_to_install_it(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, service, None)
    assert track(service, tmp_path, 1)._opened is None
    assert "pip install 'flare-sparse[track]'" in caplog.text


@pytest.mark.slow
def test_wandb_writes_to_the_folder_of_the_job_without_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2 as messages

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    track("wandb", tmp_path)
    (file,) = (tmp_path / FOLDERS["wandb"]).glob("offline-run-*/*.wandb")
    records = [messages.Record.FromString(data) for data in read_records(file)]
    assert {record.run.project for record in records} - {""} == {"study"}
    figures = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
    ]
    assert [figure["mae"] for figure in figures if "mae" in figure] == [2.5, 2.5]


def read_records(file: Path) -> Iterator[bytes]:
    """The records of a file of W&B that has one block: a head of 7 bytes, then checksum, length, kind and content."""
    content, position = file.read_bytes(), 7
    while position + 7 <= len(content):
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        yield content[position + 7 : position + 7 + size]
        position += 7 + size
