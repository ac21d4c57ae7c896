"""FLARE's receivers record the server's own figures in one run of their service, and no failure of it ends a job."""

from __future__ import annotations

import json
import logging
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo

from flare_sparse.flare.tracking import FOLDERS, MLFLOW_VARIABLES, Tracker

RECEIVER = "nvflare.app_opt.tracking.mlflow.mlflow_receiver"
WANDB_RECEIVER = "nvflare.app_opt.tracking.wandb.wandb_receiver"


class Client:
    """MLflow's client, as far as FLARE uses it; keeps what it is sent, after some requests that fail."""

    failures = 0

    uri = "http://mlflow"

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, float, int]] = []
        self.requests = 0
        Client.last = self
        if "down" in Client.uri:
            raise ConnectionError("MLflow does not reply")

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return f"experiment {name}"

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str]) -> Any:
        self.run = (experiment_id, run_name, tags)
        return SimpleNamespace(info=SimpleNamespace(run_id="run-1"))

    def log_batch(self, run_id: str, metrics: list[Any], params: list[Any], tags: list[Any]) -> None:
        self.requests += 1
        if self.requests <= self.failures:
            raise ConnectionError("MLflow does not reply")
        self.sent += [(run_id, metric.key, metric.value, metric.step) for metric in metrics]

    def set_terminated(self, run_id: str) -> None:
        self.terminated = run_id


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the parts of MLflow that FLARE imports in place of the package."""
    entities = {
        "Metric": namedtuple("Metric", "key value timestamp step"),
        "Param": namedtuple("Param", "key value"),
        "RunTag": namedtuple("RunTag", "key value"),
    }

    def set_tracking_uri(uri: str) -> None:
        Client.uri = uri

    members = {"set_tracking_uri": set_tracking_uri}
    contents = {"": members, ".entities": entities, ".tracking": {}, ".tracking.client": {"MlflowClient": Client}}
    for name, members in contents.items():
        module = ModuleType(f"mlflow{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"mlflow{name}", module)
    monkeypatch.delitem(sys.modules, RECEIVER, raising=False)
    for name in MLFLOW_VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")


@pytest.fixture
def context(tmp_path: Path) -> FLContext:
    workspace = SimpleNamespace(get_run_dir=lambda _job: str(tmp_path))
    engine = SimpleNamespace(get_workspace=lambda: workspace)
    context = FLContext()
    context.set_prop(ReservedKey.ENGINE, engine, private=True, sticky=False)
    context.set_prop(ReservedKey.RUN_NUM, "job-7")
    context.set_prop(ReservedKey.IDENTITY_NAME, "the server")
    return context


def run_job(tracker: Tracker, context: FLContext) -> None:
    tracker.handle_event(EventType.START_RUN, context)
    if tracker._receiver is not None:
        tracker._receiver.buff_flush_time = 0  # a request for each figure
    for step, value in ((1, 2.5), (2, 2.0)):
        dxo = create_analytic_dxo("mae", value, AnalyticsDataType.SCALAR, global_step=step)
        context.set_prop(FLContextKey.EVENT_DATA, dxo.to_shareable(), private=True, sticky=False)
        tracker.handle_event("analytix_log_stats", context)
    tracker.handle_event(EventType.END_RUN, context)


@pytest.mark.usefixtures("mlflow")
def test_figures_of_the_server_go_to_one_run_with_its_names_and_tags(context: FLContext) -> None:
    run_job(Tracker("mlflow", "brain_age", "p98", {"method": "neurosfl"}), context)
    tags = {"method": "neurosfl", "job_id": "job-7", "run_name": "p98"}
    assert Client.last.run == ("experiment brain_age", "p98", tags)
    assert Client.uri == "http://mlflow"
    assert Client.last.sent == [("run-1", "mae", 2.5, 1), ("run-1", "mae", 2.0, 2)]
    assert Client.last.terminated == "run-1"


@pytest.mark.usefixtures("mlflow")
def test_figures_that_could_not_be_sent_are_sent_at_the_end(
    context: FLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "failures", 1)
    run_job(Tracker("mlflow", "brain_age", "p98"), context)
    assert Client.last.sent == [("run-1", "mae", 2.5, 1), ("run-1", "mae", 2.0, 2)]
    assert Client.last.requests == 2, "after a failure only the end of the job tries again within RETRY_S"


@pytest.mark.usefixtures("mlflow")
def test_mlflow_that_does_not_reply_leaves_an_error_in_the_log(
    context: FLContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://down")
    with caplog.at_level(logging.ERROR):
        run_job(Tracker("mlflow", "brain_age", "p98"), context)
    assert "Receiver initialize failed with MLflow does not reply" in caplog.text
    assert Client.last.sent == []


@pytest.mark.usefixtures("mlflow")
def test_server_without_an_address_writes_to_the_folder_of_the_job(
    context: FLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    run_job(Tracker("mlflow", "brain_age", "p98"), context)
    assert Client.uri == (tmp_path / FOLDERS["mlflow"]).as_uri()


@pytest.mark.parametrize("service", ["mlflow", "wandb"])
def test_server_without_the_package_goes_on_and_its_log_says_how_to_install_it(
    service: str, context: FLContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "mlflow.tracking.client", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in (RECEIVER, WANDB_RECEIVER):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with caplog.at_level(logging.ERROR):
        run_job(Tracker(service, "brain_age", "p98"), context)
    assert "pip install 'flare-sparse[track]'" in caplog.text


def test_weights_and_biases_without_a_key_keeps_a_run_of_the_figures_for_later(
    context: FLContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from wandb.proto import wandb_internal_pb2 as messages

    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_job(Tracker("wandb", "brain_age", "p98", {"method": "neurosfl"}), context)
    (file,) = (tmp_path / FOLDERS["wandb"]).glob("offline-run-*/*.wandb")
    records = [messages.Record.FromString(data) for data in read_records(file)]
    assert {record.run.project for record in records} - {""} == {"brain_age"}
    figures = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
    ]
    assert [figure["mae"] for figure in figures if "mae" in figure] == [2.5, 2.0]


def read_records(file: Path) -> Iterator[bytes]:
    """The records of a file of W&B that has one block: a head of 7 bytes, then checksum, length, kind and content."""
    content, position = file.read_bytes(), 7
    while position + 7 <= len(content):
        size = int.from_bytes(content[position + 4 : position + 6], "little")
        yield content[position + 7 : position + 7 + size]
        position += 7 + size
