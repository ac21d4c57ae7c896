"""MetaGater's server (Lin et al. 2021, Algorithm 1): accelerated proximal steps along the sites' mean delta."""

from collections.abc import Mapping
from typing import Any

from ..methods.metagater import MetaGater, MetaGaterState
from .aggregator import MethodAggregator


class MetaStep(MethodAggregator[MetaGaterState]):
    """Takes Algorithm 1's lines 10 to 13; gate groups that the Group Lasso makes zero close for good (section 6).

    Args:
        proximity: lambda, also the weight of the sites' proximal term (FedProx's mu).
        lasso: mu, weight of the Group Lasso on the gates.
        settings: of the step and its acceleration, by the names in :attr:`rarer`; see docs/algorithms.md, section 6.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("proximity", "lasso", "min_sites")
    method_class = MetaGater
    state_class = MetaGaterState
    rarer = ("step", "acceleration", "momentum_cap", "restart_every", "scale_prox", "closed_channels", "output")

    def __init__(
        self,
        proximity: float = 0.2,
        lasso: float = 1e-4,
        settings: Mapping[str, Any] | None = None,
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.proximity, self.lasso = proximity, lasso
        super().__init__(min_sites, persistor_id, resume_from, settings, proximity=proximity, lasso=lasso)
