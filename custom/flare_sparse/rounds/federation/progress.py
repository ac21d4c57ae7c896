"""State of a run at its last commit, in memory and in a checkpoint, and which of its models is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ...core.errors import list_first
from ...core.mask import Mask
from ...core.params import Layout
from ...tasks.task import VALIDATION, Metric
from ...wire.ledger import LedgerLine
from ..endpoints.server import ServerSnapshot
from .records import BestModel, Evaluation, RoundRecord
from .rules import SiteHistory

S = TypeVar("S")


@dataclass(frozen=True)
class Progress(Generic[S]):
    """State of a run at its last commit; in a checkpoint all that it needs to continue with the same result.

    Attributes:
        state: the method's state.
        committed: last committed round; 0: none.
        best: best model so far.
        history: history of the sites.
        records: records of all rounds.
        endpoint: snapshot of the server's endpoint, in a checkpoint.
        messages: lines of the ledger, in a checkpoint.
    """

    state: S
    committed: int = 0
    best: BestModel = field(default_factory=BestModel)
    history: SiteHistory = field(default_factory=SiteHistory)
    records: tuple[RoundRecord, ...] = ()
    endpoint: ServerSnapshot = field(default_factory=ServerSnapshot)
    messages: tuple[LedgerLine, ...] = ()


def describe_cut_tensors(layout: Layout, before: Mask, after: Mask) -> str:
    """Return, in words, which weights have lost their last live entry; empty: none. Biases and norms do not count."""
    if before == after:
        return ""
    live = [layout.unflatten(mask.bits) for mask in (before, after)]
    weights = [spec.name for spec in layout.tensors if spec.role in ("weight", "other") and spec.size]
    cut = [name for name in weights if live[0][name].any() and not live[1][name].any()]
    if not cut:
        return ""
    return (
        f"no entry is live any more of {len(cut)} of {len(weights)} weights: {list_first(cut, 3)}; lower the sparsity"
    )


LOST_AFTER = 5
"""Evaluations in a row without a site after which models are compared without it."""


@dataclass(frozen=True)
class ModelComparison:
    """Comparison of models on the validation examples of the same sites.

    Attributes:
        metric: decides which of two values is better.
        max_share: largest share of a mean that one site may have.
        patience: models in a row that are not better than the best one, after which the run ends; None: never.
        is_sampled: whether rounds evaluate samples of the sites, so that an absent site is not a lost one.
    """

    metric: Metric
    max_share: float = 1.0
    patience: int | None = None
    is_sampled: bool = False

    @property
    def name(self) -> str:
        """Name of the metric on validation examples."""
        return f"{VALIDATION}{self.metric.name}"

    def is_better(self, evaluation: Evaluation, progress: Progress[Any], *, is_last: bool = False) -> bool:
        """Return whether the last committed model is better than the best one so far.

        Args:
            evaluation: the model's metrics.
            progress: the run so far, without this evaluation.
            is_last: whether no other model follows.
        """
        best = progress.best.evaluation
        if self.name not in evaluation.overall:
            return False
        if progress.best.round < 0:
            return True
        sites, best_sites = (one.list_sites_with(self.name) for one in (evaluation, best))
        if sites != best_sites:
            # Where fewer sites are sampled or reply in time, the metric says more about these sites than about the
            # model: the widest evaluation so far decides which models are compared.
            earlier = [record.evaluation for record in progress.records]
            widest = max(one.count_examples(self.name) for one in (*earlier, best))
            if evaluation.count_examples(self.name) > widest:
                return True
            # The last model is always compared: no other can replace a model that a lost site evaluated, too.
            if not (is_last or self._is_comparable([*earlier, evaluation], best_sites)) or not sites & best_sites:
                return False
            evaluation, best = (one.select_sites(sites & best_sites, self.max_share) for one in (evaluation, best))
        return self.metric.is_better(evaluation.overall[self.name], best.overall[self.name])

    def is_stopped(self, progress: Progress[Any]) -> bool:
        """Whether the run ends early: as many models in a row as ``patience`` says were not better than the best."""
        if self.patience is None or progress.best.round < 0:
            return False
        best_sites = progress.best.evaluation.list_sites_with(self.name)
        evaluations = [record.evaluation for record in progress.records]
        # A model that was evaluated at other sites than the best one is not known to be no better. The last committed
        # model is evaluated in the next round.
        no_better: set[int] = set()
        is_compared = False
        for position, record in enumerate(progress.records, 1):
            if progress.best.round < record.evaluated_round < progress.committed:
                has_metrics = bool(record.evaluation.list_sites_with(self.name))
                is_comparable = has_metrics and self._is_comparable(evaluations[:position], best_sites)
                if is_comparable or not has_metrics:
                    no_better.add(record.evaluated_round)
                is_compared |= is_comparable
        # Sites' policies may let metrics of few models leave: before the next ones, no model is known to be no better.
        return is_compared and len(no_better) >= self.patience

    def _is_comparable(self, evaluations: Sequence[Evaluation], best_sites: set[str]) -> bool:
        """Return whether the last evaluation has all sites of the best model that are not lost."""
        by_evaluation = [sites for one in evaluations if (sites := one.list_sites_with(self.name))]
        recent = by_evaluation[-LOST_AFTER:]
        is_known = len(recent) == LOST_AFTER and not self.is_sampled
        remaining = best_sites & set[str]().union(*recent) if is_known else best_sites
        return bool(remaining) and remaining <= by_evaluation[-1]
