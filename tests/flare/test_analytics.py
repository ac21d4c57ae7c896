"""A round's figures reach FLARE's analytics receivers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from nvflare.apis.analytix import AnalyticsData
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext

from flare_sparse.flare.controller import announce_round
from flare_sparse.rounds.federation.records import Evaluation, RoundRecord


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


def test_round_is_published_to_flares_analytics(context: FLContext) -> None:
    component = Recorder()
    announce_round(component, record(), context)
    figures = {"mae": 2.5, "bytes_up": 200.0, "bytes_down": 300.0, "contributed": 2.0, "seconds": 1.5}
    assert math.isnan(component.figures.pop("r2")[0])
    assert component.figures == {name: (value, 3) for name, value in figures.items()}
