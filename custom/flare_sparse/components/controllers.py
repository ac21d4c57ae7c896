"""Controllers of methods whose rounds are not all alike, on FLARE's FedAvg.

MetaGater (Lin et al. 2021, Algorithm 1) on FLARE's FedAvg: meta-steps, then one step of adaptation at each site.

NeuroSFL (Thapaliya et al. 2024, Algorithm 1) on FLARE's FedAvg: scores, one mask, then rounds inside it.
"""

from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg

from .aggregators import MetaStep, ScoredMask, check_aggregator


class NeuroSFLController(FedAvg):
    """FLARE's FedAvg inside a mask. Before its first round the sites score the initial model.

    Persistor, model selection, early stopping and events are FedAvg's. A site that fails is left out of the exchange,
    and fewer answers than the aggregator's ``min_sites`` end the job. With ``start_round`` above 0 the run continues:
    the persistor loads the model of the earlier job, and the aggregator's ``resume_from`` names its state.

    Args:
        aggregator: turns the scores into a mask, and averages inside it.
        score_task: name of the task that ``ScoreExecutor`` or the script answers.
        args, kwargs: arguments of FedAvg.
    """

    _always_serialize_args = ("score_task",)

    def __init__(self, *args: Any, aggregator: ScoredMask, score_task: str = "score", **kwargs: Any):
        super().__init__(*args, aggregator=aggregator, **{"ignore_result_error": True, **kwargs})
        check_aggregator(self, aggregator, ScoredMask)
        self.score_task = score_task

    def load_model(self) -> FLModel:
        """Return the initial model inside the mask of the sites' scores; FedAvg calls it once."""
        model, aggregator = super().load_model(), self.aggregator
        if self.start_round or aggregator.resume_from:
            return model
        aggregator.start(self.fl_ctx, self.num_rounds)
        model.current_round, model.total_rounds = self.start_round, self.num_rounds
        for result in self.send_model_and_wait(
            self.score_task, model, targets=self.sample_clients(self.num_clients), min_responses=0
        ):
            aggregator.offer_model(result)
        scored = aggregator.aggregate_model()
        model = self.update_model(model, scored)
        self.info(f"NeuroSFL: {aggregator.describe()}")
        self.save_model(model)
        return model


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
