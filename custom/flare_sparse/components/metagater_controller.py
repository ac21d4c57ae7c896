"""MetaGater (Lin et al. 2021, Algorithm 1) on FLARE's FedAvg: meta-steps, then one step of adaptation at each site."""

from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg

from .aggregator import check_aggregator
from .meta_step import MetaStep


class MetaGaterController(FedAvg):
    """FLARE's FedAvg whose server takes MetaGater's steps, and whose sites get FedProx's ``fedprox_mu`` = lambda.

    A script minimises its loss plus ``fedprox_mu / 2 * ||w - w_received||^2``, as FLARE's ``PTFedProxLoss`` does. The
    last model goes to all sites in the task ``adapt_task``, where each may adapt it and send the metrics.

    Args:
        aggregator: takes the steps; its ``proximity`` is lambda.
        adapt_task: name of the last task; empty: no adaptation.
        args, kwargs: arguments of FedAvg.
    """

    _always_serialize_args = ("adapt_task",)

    def __init__(self, *args: Any, aggregator: MetaStep, adapt_task: str = "", **kwargs: Any):
        check_aggregator(self, aggregator, MetaStep)
        settings = {"ignore_result_error": True, "fedprox_mu": aggregator.proximity, **kwargs}
        super().__init__(*args, aggregator=aggregator, **settings)
        self.adapt_task = adapt_task

    def run(self) -> None:
        """Run FedAvg's rounds, then send the result to be adapted."""
        super().run()
        learnable = self.fl_ctx.get_prop(AppConstants.GLOBAL_MODEL)
        if not self.adapt_task or learnable is None or self.abort_signal.triggered:
            return
        model = FLModel(params=learnable[ModelLearnableKey.WEIGHTS], meta=dict(learnable[ModelLearnableKey.META]))
        model.current_round, model.total_rounds = self.start_round + self.num_rounds, self.num_rounds
        for result in sorted(self.send_model_and_wait(self.adapt_task, model), key=lambda r: r.meta["client_name"]):
            self.info(f"MetaGater: {result.meta['client_name']} after adaptation: {result.metrics}")
