"""NeuroSFL (Thapaliya et al. 2024, Algorithm 1) on FLARE's FedAvg: scores, one mask, then rounds inside it."""

from __future__ import annotations

from typing import Any

from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.fedavg import FedAvg

from ..methods.method import MaskPreset
from .scored_mask import ScoredMask, Scores


class NeuroSFLController(FedAvg):
    """FLARE's FedAvg inside a mask. Before its first round the sites score the initial model.

    Persistor, model selection, early stopping and events are FedAvg's. A site that fails is left out of the exchange,
    and fewer than ``min_sites`` answers end the job. With ``start_round`` above 0 the run continues: the persistor
    loads the model of the earlier job, and ``resume_from`` names its ``ScoredMask.safetensors``.

    Args:
        sparsity, scores, min_per_layer, maskable, resume_from: see :class:`.scored_mask.ScoredMask`.
        min_sites: quorum of the scores and of each round.
        score_task: name of the task that ``ScoreExecutor`` or the script answers.
        args, kwargs: arguments of FedAvg.
    """

    _always_serialize_args = ("sparsity", "scores", "min_sites")

    def __init__(
        self,
        *args: Any,
        sparsity: float = 0.9,
        scores: Scores = "snip",
        min_per_layer: int = 1,
        maskable: MaskPreset = "conv_linear_weights",
        min_sites: int = 1,
        resume_from: str = "",
        score_task: str = "score",
        **kwargs: Any,
    ):
        super().__init__(*args, **{"ignore_result_error": True, **kwargs})
        self.sparsity, self.scores, self.min_per_layer, self.maskable = sparsity, scores, min_per_layer, maskable
        self.min_sites, self.resume_from, self.score_task = min_sites, resume_from, score_task
        # Refused here, before the job runs.
        self._build_aggregator()

    def _build_aggregator(self) -> ScoredMask:
        return ScoredMask(
            self.sparsity, self.scores, self.min_per_layer, self.maskable, self.min_sites, self._persistor_id,
            self.resume_from,
        )  # fmt: skip

    def load_model(self) -> FLModel:
        """Return the initial model inside the mask of the sites' scores; FedAvg calls it once."""
        model = super().load_model()
        self.aggregator = aggregator = self._build_aggregator()
        aggregator.start(self.fl_ctx, self.num_rounds)
        if self.start_round or self.resume_from:
            return model
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
