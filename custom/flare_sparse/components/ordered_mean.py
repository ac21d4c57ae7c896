"""FedAvg's mean in the order of site names, and robust rules in its place."""

from typing import Literal

from ..methods.fedavg import FedAvg
from ..methods.support.averaging import AveragedState
from .aggregator import MethodAggregator


class OrderedMean(MethodAggregator[AveragedState]):
    """The mean of the sites' models, weighted by their steps, with the same bits for every order of arrival.

    Args:
        rule: ``"mean"``, or ``"median"`` or ``"trimmed_mean"`` by entry, in which each site counts once.
        trim: share of the sites that ``trimmed_mean`` leaves out at each end.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("rule", "min_sites")
    method_class = FedAvg
    state_class = AveragedState

    def __init__(
        self,
        rule: Literal["mean", "median", "trimmed_mean"] = "mean",
        trim: float = 0.1,
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.rule, self.trim = rule, trim
        super().__init__(min_sites, persistor_id, resume_from, aggregation={"rule": rule, "trim": trim})
