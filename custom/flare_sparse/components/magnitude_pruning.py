"""FedSparsify's server (Stripelis et al. 2022, Algorithm 1): FedAvg's mean, pruned by magnitude on a schedule."""

from __future__ import annotations

from ..methods.fedsparsify import FedSparsify, FedSparsifyState
from ..methods.method import MaskPreset
from .aggregator import MethodAggregator


class MagnitudePruning(MethodAggregator[FedSparsifyState]):
    """Averages the sites' models and switches the smallest entries off for good (docs/algorithms.md, section 2).

    Its mask travels with the model; ``KeepMask`` holds the sites to it.

    Args:
        sparsity: S_T, share of pruned entries after the last round of the controller.
        initial_sparsity: S_0.
        first_round: t_0, first round of the schedule, 1-based.
        prune_every: F, rounds between prunings.
        exponent: n of the schedule (Eq. 1).
        force_final: reach S_T in the last round even if ``prune_every`` does not divide it.
        prunable: ``"all_but_norm"``, ``"conv_linear_weights"`` or ``"all_trainable"``.
        min_sites, persistor_id, resume_from: see :class:`.aggregator.MethodAggregator`.
    """

    _always_serialize_args = ("sparsity", "initial_sparsity", "first_round", "prune_every", "exponent", "min_sites")
    method_class = FedSparsify
    state_class = FedSparsifyState

    def __init__(
        self,
        sparsity: float = 0.9,
        initial_sparsity: float = 0.0,
        first_round: int = 1,
        prune_every: int = 1,
        exponent: float = 3.0,
        force_final: bool = False,
        prunable: MaskPreset = "all_but_norm",
        min_sites: int = 1,
        persistor_id: str = "persistor",
        resume_from: str = "",
    ):
        self.sparsity, self.initial_sparsity, self.first_round = sparsity, initial_sparsity, first_round
        self.prune_every, self.exponent, self.force_final, self.prunable = prune_every, exponent, force_final, prunable
        super().__init__(
            min_sites, persistor_id, resume_from,
            sparsity=sparsity, initial_sparsity=initial_sparsity, first_round=first_round, prune_every=prune_every,
            exponent=exponent, force_final=force_final, prunable=prunable,
        )  # fmt: skip
