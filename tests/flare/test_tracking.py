"""FLARE's MLflow receiver records the server's own figures in one run of MLflow, and no failure of it ends a job."""

from __future__ import annotations

import logging
import sys
from collections import namedtuple
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo

from flare_sparse.flare.tracking import MlflowTracker

RECEIVER = "nvflare.app_opt.tracking.mlflow.mlflow_receiver"


class Client:
    """MLflow's client, as far as FLARE uses it; keeps what it is sent, after some requests that fail."""

    failures = 0

    def __init__(self, tracking_uri: str):
        self.sent: list[tuple[str, str, float, int]] = []
        self.requests = 0
        Client.last = self
        if "down" in tracking_uri:
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
    contents = {"": {}, ".entities": entities, ".tracking": {}, ".tracking.client": {"MlflowClient": Client}}
    for name, members in contents.items():
        module = ModuleType(f"mlflow{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"mlflow{name}", module)
    monkeypatch.delitem(sys.modules, RECEIVER, raising=False)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")


@pytest.fixture
def context() -> FLContext:
    context = FLContext()
    context.set_prop(ReservedKey.RUN_NUM, "job-7")
    context.set_prop(ReservedKey.IDENTITY_NAME, "the server")
    return context


def run_job(tracker: MlflowTracker, context: FLContext) -> None:
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
    run_job(MlflowTracker("http://mlflow", "brain_age", "p98", {"method": "neurosfl"}), context)
    assert Client.last.run == ("experiment brain_age", "p98", {"method": "neurosfl", "job_id": "job-7"})
    assert Client.last.sent == [("run-1", "mae", 2.5, 1), ("run-1", "mae", 2.0, 2)]
    assert Client.last.terminated == "run-1"


@pytest.mark.usefixtures("mlflow")
def test_figures_that_could_not_be_sent_are_sent_at_the_end(
    context: FLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "failures", 1)
    run_job(MlflowTracker("http://mlflow", "brain_age", "p98"), context)
    assert Client.last.sent == [("run-1", "mae", 2.5, 1), ("run-1", "mae", 2.0, 2)]
    assert Client.last.requests == 2, "after a failure only the end of the job tries again within RETRY_S"


@pytest.mark.usefixtures("mlflow")
def test_mlflow_that_does_not_reply_leaves_an_error_in_the_log(
    context: FLContext, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        run_job(MlflowTracker("http://down", "brain_age", "p98"), context)
    assert "Receiver initialize failed with MLflow does not reply" in caplog.text
    assert Client.last.sent == []


def test_server_without_mlflow_goes_on_and_its_log_says_how_to_install_it(
    context: FLContext, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mlflow", "mlflow.tracking.client"):
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level(logging.ERROR):
        run_job(MlflowTracker("http://mlflow", "brain_age", "p98"), context)
    assert "pip install 'flare-sparse[mlflow]'" in caplog.text
