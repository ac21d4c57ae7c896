"""The server of methods whose sites send a part of their delta (SCBF, DSSGD): their sum, or a mean."""

import torch
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from ..core.mask import Mask
from ..methods.scbf import SCBF
from ..methods.support.selective import Aggregation, SelectiveState
from .aggregator import MethodAggregator
from .arrays import MASK, read_mask, to_vector


class SelectiveSum(MethodAggregator[SelectiveState]):
    """Adds the deltas that sites sent; running statistics are averaged (docs/algorithms.md, section 3.3).

    The entries that a site sent are those of the mask of ``ChannelUpload`` or ``RankUpload``. Without one they are the
    entries of a difference that are not zero, or all of the tensors that the update has (ExcludeVars).

    Args:
        aggregation: ``"sum"`` of all deltas (the papers); ``"mean"``: weighted by steps, what was not sent counts as
            zero; ``"count"``: weighted mean over the sites that sent an entry.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("aggregation", "min_sites")
    method_class = SCBF
    state_class = SelectiveState

    def __init__(
        self,
        aggregation: Aggregation = "sum",
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.aggregation = aggregation
        super().__init__(min_sites, persistor_id, resume_from, aggregation=aggregation)

    def select_sent(self, model: FLModel, present: Mask, site: str) -> Mask:
        assert self._method is not None, "init_state() comes first"
        layout = self._method.layout
        if MASK in (model.meta or {}):
            # A filter behind the selection (ExcludeVars) may have removed tensors.
            return read_mask(model.meta[MASK], layout, self) & present
        if model.params_type != ParamsType.DIFF:
            return present
        missing = {spec.name: torch.zeros(spec.shape) for spec in layout.tensors if spec.name not in model.params}
        return Mask(to_vector({**model.params, **missing}, layout, self) != 0)
