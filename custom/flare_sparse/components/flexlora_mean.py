"""FlexLoRA's server (Bai et al. 2024): the mean of the sites' products ``B_k A_k``, decomposed by SVD."""

from collections.abc import Mapping
from typing import Literal

from nvflare.app_common.abstract.fl_model import FLModel

from ..core.mask import Mask
from ..methods.flexlora import FlexLoRA
from ..methods.method import ModelState
from .aggregator import MethodAggregator


class FlexLoRAMean(MethodAggregator[ModelState]):
    """Averages products of adapters; slot ``i`` of the result is the ``i``-th singular direction (section 4.9).

    Args:
        rank: r_k of a site, of whose adapters the first r_k slots count.
        ranks: r_k of single sites, by name.
        split: ``"balanced"``: sqrt(S) in each factor; ``"left"``: all of S in B.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("rank", "ranks", "split", "min_sites")
    method_class = FlexLoRA
    state_class = ModelState

    def __init__(
        self,
        rank: int = 8,
        ranks: Mapping[str, int] | None = None,
        split: Literal["balanced", "left"] = "balanced",
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.rank, self.ranks, self.split = rank, dict(ranks or {}), split
        super().__init__(min_sites, persistor_id, resume_from, rank=rank, ranks=self.ranks, split=split)

    def select_sent(self, model: FLModel, present: Mask, site: str) -> Mask:
        assert isinstance(self._method, FlexLoRA), "init_state() comes first"
        return self._method.select_first_ranks(self._method.config.get_rank(site))
