"""MetaGater (Lin et al. 2021, Algorithm 1) on FLARE's FedAvg: meta-steps, then one step of adaptation at each site."""

from __future__ import annotations

from typing import Any, Literal

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnableKey
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.workflows.fedavg import FedAvg

from .meta_step import MetaStep


class MetaGaterController(FedAvg):
    """FLARE's FedAvg whose server takes MetaGater's steps, and whose sites get FedProx's ``fedprox_mu`` = lambda.

    A script minimises its loss plus ``fedprox_mu / 2 * ||w - w_received||^2``, as FLARE's ``PTFedProxLoss`` does. The
    last model goes to all sites in the task ``adapt_task``, where each may adapt it and send the metrics.

    Args:
        proximity, step, acceleration, momentum_cap, restart_every, lasso, scale_prox, closed_channels, output,
            resume_from: see :class:`.meta_step.MetaStep`.
        min_sites: quorum of a round.
        adapt_task: name of the last task; empty: no adaptation.
        args, kwargs: arguments of FedAvg.
    """

    _always_serialize_args = ("proximity", "step", "acceleration", "lasso", "closed_channels", "output", "min_sites")

    def __init__(
        self,
        *args: Any,
        proximity: float = 0.2,
        step: float = 1.0,
        acceleration: bool = True,
        momentum_cap: float = 1.0,
        restart_every: int | None = None,
        lasso: float = 1e-4,
        scale_prox: bool = True,
        closed_channels: Literal["permanent", "reopenable"] = "permanent",
        output: Literal["pr", "pr_next", "ag"] = "pr",
        min_sites: int = 1,
        resume_from: str = "",
        adapt_task: str = "",
        **kwargs: Any,
    ):
        super().__init__(*args, **{"ignore_result_error": True, "fedprox_mu": proximity, **kwargs})
        self.proximity, self.step, self.acceleration, self.momentum_cap = proximity, step, acceleration, momentum_cap
        self.restart_every, self.lasso, self.scale_prox = restart_every, lasso, scale_prox
        self.closed_channels, self.output = closed_channels, output
        self.min_sites, self.resume_from, self.adapt_task = min_sites, resume_from, adapt_task
        # Refused here, before the job runs.
        self._build_aggregator()

    def _build_aggregator(self) -> MetaStep:
        return MetaStep(
            self.proximity, self.step, self.acceleration, self.momentum_cap, self.restart_every, self.lasso,
            self.scale_prox, self.closed_channels, self.output, self.min_sites, self._persistor_id, self.resume_from,
        )  # fmt: skip

    def load_model(self) -> FLModel:
        """Return the initial model; FedAvg calls it once."""
        model = super().load_model()
        self.aggregator = aggregator = self._build_aggregator()
        aggregator.start(self.fl_ctx, self.num_rounds)
        return model

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
