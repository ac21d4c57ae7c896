"""Publish a run's metrics as FLARE expects them: metrics artifacts, the best round, analytics, monitoring."""

import math
from collections.abc import Mapping

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.fuel.data_event.data_bus import DataBus
from nvflare.metrics.metrics_keys import MetricKeys, MetricTypes
from nvflare.metrics.metrics_publisher import publish_app_metrics

from ..rounds.federation import BestModel, RoundRecord
from ..tasks.task import Metric

MONITORING = "flare_sparse"
"""Prefix of the figures' names in FLARE's monitoring: ``flare_sparse_bytes_up``."""


def announce_round(component: FLComponent, record: RoundRecord, job_name: str, fl_ctx: FLContext) -> None:
    """Publish a round to FLARE's MetricsArtifactWriter, its analytics receivers and its monitoring.

    The metrics are those of the model after ``record.evaluated_round``.
    """
    if record.evaluation.sites:
        sites = [
            {"name": name, "metrics": metrics, "weight": metrics.get("test_examples", 1.0)}
            for name, metrics in sorted(record.evaluation.sites.items())
        ]
        info = {"metric_source": "site_test_examples", "sites": sites}
        model = FLModel(
            metrics=dict(record.evaluation.overall),
            current_round=record.evaluated_round,
            meta={AppConstants.METRICS_AGGREGATION_INFO: info},
        )
        component.fire_event_with_data(AppEventType.AFTER_AGGREGATION, fl_ctx, AppConstants.AGGREGATION_RESULT, model)
    figures = {
        **record.evaluation.overall,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "contributed": len(record.sites_contributed),
        "seconds": record.seconds,
    }
    for tag, value in figures.items():
        dxo = create_analytic_dxo(tag, float(value), AnalyticsDataType.SCALAR, global_step=record.evaluated_round)
        send_analytic_dxo(component, dxo, fl_ctx, fire_fed_event=False)
    tags = {"job_name": job_name, "job_id": fl_ctx.get_job_id()}
    publish_gauges({**figures, "round": record.round}, tags)


def publish_gauges(figures: Mapping[str, float], tags: Mapping[str, str]) -> None:
    """Publish figures on the data bus of this process, where FLARE's StatsDReporter takes them if one is configured.

    Args:
        figures: values by name; StatsD has no notation for one that is not finite, so such a value is left out.
        tags: tags of every figure.
    """
    gauges = {name: float(value) for name, value in figures.items() if math.isfinite(value)}
    publish_app_metrics({**gauges, MetricKeys.type: MetricTypes.GAUGE}, MONITORING, dict(tags), DataBus())


def announce_best(component: FLComponent, best: BestModel, metric: Metric, fl_ctx: FLContext) -> None:
    """Fire the event that names the best round in FLARE's metrics summary; none if no model was evaluated."""
    if best.round < 0:
        return
    info = {
        "best_round": best.round,
        "best_metrics": best.metrics,
        "best_aggregated_metrics": best.metrics,
        "key_metric": {"name": metric.name, "mode": metric.mode},
        "source": "flare_sparse",
    }
    component.fire_event_with_data(
        AppEventType.GLOBAL_BEST_MODEL_AVAILABLE, fl_ctx, AppConstants.METRICS_SELECTION_INFO, info
    )
