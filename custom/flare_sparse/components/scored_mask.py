"""NeuroSFL's server (Thapaliya et al. 2024, Algorithm 1): one mask from the sites' scores, then the mean inside it."""

from collections.abc import Mapping
from typing import Any, Literal

from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor

from ..core.exchange import Content
from ..core.mask import Mask
from ..methods.neurosfl import NeuroSFL, NeuroSFLState
from .aggregator import MethodAggregator
from .arrays import ComponentError


class ScoredMask(MethodAggregator[NeuroSFLState]):
    """Turns the first round's scores into a mask, and averages inside it from the second on (section 5 of the docs).

    ``NeuroSFLController`` asks for the scores. In a workflow of its own, FedAvg with ``task_name="score"`` and
    ``num_rounds=1``, it leaves the masked model to the workflow behind it.

    Args:
        sparsity: p, share of the maskable entries that is off.
        scores: ``"snip"``, ``"weighted_snip"`` (by the sites' numbers) or ``"shuffled_snip"``.
        settings: ``min_per_layer``, live entries that every maskable tensor keeps, and ``maskable``; see section 5.2.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("sparsity", "scores", "min_sites")
    method_class = NeuroSFL
    state_class = NeuroSFLState
    rarer = ("min_per_layer", "maskable")

    def __init__(
        self,
        sparsity: float = 0.9,
        scores: Literal["snip", "weighted_snip", "shuffled_snip"] = "snip",
        settings: Mapping[str, Any] | None = None,
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.sparsity, self.scores = sparsity, scores
        super().__init__(min_sites, persistor_id, resume_from, settings, sparsity=sparsity, scores=scores)

    def select_sent(self, model: FLModel, present: Mask, site: str) -> Mask:
        assert self._state is not None, "init_state() comes first"
        return Mask.full(present.size) if self._state.round == 0 else self._read_live()

    def get_content(self, state: NeuroSFLState) -> Content:
        return "scores" if state.round == 0 else "weights"

    def check_values(self, values: Tensor, state: NeuroSFLState) -> None:
        if state.round == 0 and bool((values < 0).any()):
            raise ComponentError(
                self,
                f"the scores have negative values, such as {float(values.min()):.3g}",
                "send what compute_scores returns with params_type=ParamsType.DIFF; otherwise FLARE subtracts the "
                "model from scores where params_transfer_type is DIFF",
            )
