"""LoRA-A2's server (Koo et al. 2025, Eq. 3): the mean delta of the active factor, in the slots that sites sent."""

from typing import Literal

from nvflare.app_common.abstract.fl_model import FLModel

from ..core.mask import Mask
from ..methods.lora_a2 import LoRAA2, LoRAA2State
from .aggregator import MethodAggregator
from .arrays import MASK, ComponentError, read_mask


class RankMean(MethodAggregator[LoRAA2State]):
    """Adds ``sum_k w_k dB_k``; a slot that a site did not send counts with a delta of zero (docs/algorithms.md, 4.4).

    Args:
        schedule: as of ``RankUpload``, which the sites need.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("schedule", "min_sites")
    method_class = LoRAA2
    state_class = LoRAA2State

    def __init__(
        self,
        schedule: Literal["alternate", "b_only"] = "alternate",
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.schedule = schedule
        super().__init__(min_sites, persistor_id, resume_from, schedule=schedule)

    def select_sent(self, model: FLModel, present: Mask, site: str) -> Mask:
        method, state = self._method, self._state
        assert isinstance(method, LoRAA2), "init_state() comes first"
        assert state is not None, "init_state() comes first"
        if MASK not in (model.meta or {}):
            raise ComponentError(self, "the update names no slots", "add RankUpload to the sites' task_result_filters")
        sent, exchanged = read_mask(model.meta[MASK], method.layout, self), method.select_exchanged(state.round)
        if not sent <= exchanged or method.slots.find_slots(sent, method.get_active_factor(state.round)) is None:
            raise ComponentError(self, "the update has other entries than whole slots of the active factor", "use one "
                                 "schedule in RankUpload and RankMean")  # fmt: skip
        return sent
