"""FedSparsify's server (Stripelis et al. 2022, Algorithm 1): FedAvg's mean, pruned by magnitude on a schedule."""

from collections.abc import Mapping
from typing import Any

from ..methods.fedsparsify import FedSparsify, FedSparsifyState
from .aggregator import MethodAggregator


class MagnitudePruning(MethodAggregator[FedSparsifyState]):
    """Averages the sites' models and switches the smallest entries off for good (docs/algorithms.md, section 2).

    Its mask travels with the model; ``KeepMask`` holds the sites to it.

    Args:
        sparsity: S_T, share of pruned entries after the last round of the controller.
        settings: of the schedule (Eq. 1) and of what is pruned, by the names in :attr:`rarer`; see section 2.5.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("sparsity", "min_sites")
    method_class = FedSparsify
    state_class = FedSparsifyState
    rarer = ("initial_sparsity", "first_round", "prune_every", "exponent", "force_final", "prunable")

    def __init__(
        self,
        sparsity: float = 0.9,
        settings: Mapping[str, Any] | None = None,
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.sparsity = sparsity
        super().__init__(min_sites, persistor_id, resume_from, settings, sparsity=sparsity)
