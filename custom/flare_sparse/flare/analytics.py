"""Publish a run's metrics as FLARE expects them: metrics artifacts, the best round, analytics."""

from nvflare.apis.analytix import AnalyticsDataType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.utils.analytix_utils import create_analytic_dxo, send_analytic_dxo
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from ..rounds.federation import BestModel, RoundRecord
from ..tasks.task import Metric


def announce_round(component: FLComponent, record: RoundRecord, fl_ctx: FLContext) -> None:
    """Publish a round to FLARE's MetricsArtifactWriter and its analytics receivers.

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
