"""A round's figures reach FLARE's analytics receivers, and its monitoring as StatsD datagrams."""

from __future__ import annotations

import importlib.util
import math
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from nvflare.apis.analytix import AnalyticsData
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReservedKey, ReservedTopic
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.data_event.data_bus import DataBus
from skips import require

from flare_sparse.flare.analytics import announce_round, publish_gauges
from flare_sparse.rounds.federation import Evaluation, RoundRecord


class Recorder(FLComponent):
    """Keeps the analytics that it fires."""

    def __init__(self) -> None:
        super().__init__()
        self.figures: dict[str, tuple[float, int]] = {}

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type == "analytix_log_stats":
            data = AnalyticsData.from_dxo(from_shareable(fl_ctx.get_prop(FLContextKey.EVENT_DATA)))
            self.figures[data.tag] = (data.value, data.step)


@pytest.fixture
def context() -> FLContext:
    context = FLContext()
    context.set_prop(ReservedKey.RUN_NUM, "job-7")
    return context


@pytest.fixture
def bus() -> Iterator[DataBus]:
    """FLARE's data bus, which is one per process, without subscribers of other tests."""
    bus = DataBus()
    bus.subscribers.pop(ReservedTopic.APP_METRICS, None)
    yield bus
    bus.subscribers.pop(ReservedTopic.APP_METRICS, None)


def record() -> RoundRecord:
    lists: dict[str, Any] = {key: [] for key in ("abstained", "timed_out", "quarantined")}
    mappings: dict[str, Any] = {key: {} for key in ("rejected", "excluded", "capped", "clipped")}
    return RoundRecord(
        kind="train",
        round=4,
        sequence=4,
        sites_asked=["a", "b", "c"],
        sites_contributed=["a", "b"],
        attempts=1,
        evaluated_round=3,
        evaluation=Evaluation(overall={"mae": 2.5, "r2": math.nan}, sites={}),
        bytes_down=300,
        bytes_up=200,
        dense_bytes=900,
        sparsity=0.5,
        seconds=1.5,
        committed_at=0.0,
        **lists,
        **mappings,
    )


def test_round_is_published_to_analytics_and_to_monitoring(context: FLContext, bus: DataBus) -> None:
    published: list[dict[str, Any]] = []
    bus.subscribe([ReservedTopic.APP_METRICS], lambda _topic, metrics, _bus: published.extend(metrics))
    component = Recorder()
    announce_round(component, record(), "study", context)
    figures = {"mae": 2.5, "bytes_up": 200.0, "bytes_down": 300.0, "contributed": 2.0, "seconds": 1.5}
    assert math.isnan(component.figures.pop("r2")[0])
    assert component.figures == {name: (value, 3) for name, value in figures.items()}
    assert {metric["metric_name"]: metric["value"] for metric in published} == {
        f"flare_sparse_{name}": value for name, value in {**figures, "round": 4.0}.items()
    }
    assert {metric["type"] for metric in published} == {"gauge"}
    assert all(metric["tags"] == {"job_name": "study", "job_id": "job-7"} for metric in published)


def test_flares_statsd_reporter_sends_the_figures_as_datagrams(bus: DataBus) -> None:
    require(importlib.util.find_spec("datadog") is not None, "datadog is needed: pip install 'flare-sparse[statsd]'")
    from datadog import statsd
    from nvflare.fuel_opt.statsd.statsd_reporter import StatsDReporter

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        receiver.settimeout(10)
        StatsDReporter(site="server", host="127.0.0.1", port=receiver.getsockname()[1])
        publish_gauges({"round": 4, "bytes_up": 200, "r2": math.nan}, {"job_name": "study"})
        statsd.flush()
        lines: set[str] = set()
        while len(lines) < 2:
            datagram = receiver.recv(65536).decode()
            lines |= {line for line in datagram.splitlines() if line.startswith("flare_sparse_")}
    assert lines == {"flare_sparse_round:4.0|g|#job_name:study", "flare_sparse_bytes_up:200.0|g|#job_name:study"}
