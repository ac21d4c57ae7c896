"""What is known of a round, of a run so far, and of its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from ..aggregation.weighted import cap
from ..endpoints.server import ServerSnapshot
from ..exchange import Contribution, EncryptedValues
from ..mask import Mask
from ..wire.ledger import LedgerLine
from .rules import Roster

S = TypeVar("S")


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model: over all test examples, and per site."""

    overall: dict[str, float]
    sites: dict[str, dict[str, float]]

    @classmethod
    def from_updates(cls, updates: list[Contribution], max_share: float = 1.0) -> Evaluation:
        """Means weighted by test examples (the pooled value for means such as MAE and accuracy).

        Args:
            updates: with metrics, or without.
            max_share: largest share of a mean that one site may have.
        """
        sites = {u.site: u.metrics for u in updates if u.metrics}
        total = sum(_counted(list(sites.values()), max_share))
        names = sorted({n for m in sites.values() for n in m} - {"test_examples"})
        overall = {}
        for name in names:
            having = [m for m in sites.values() if name in m]
            weights = _counted(having, max_share)
            overall[name] = sum(m[name] * weight for m, weight in zip(having, weights, strict=True)) / sum(weights)
        return cls({**overall, "test_examples": total} if sites else {}, sites)


def _counted(metrics: list[dict[str, float]], max_share: float) -> list[float]:
    """The test examples that each site's metrics are weighted by."""
    return cap([found.get("test_examples", 1.0) for found in metrics], max_share)


@dataclass(frozen=True)
class RoundRecord:
    """What is known when a round has been committed; one line of ``rounds.jsonl``.

    It balances: every site asked is in exactly one of ``sites_contributed``, ``rejected``, ``abstained`` and ``timed_out``.
    ``evaluation`` is of the model that the round started from (``evaluated_round``); the model it ends with is judged in
    the next round, the last one after all rounds. ``committed_at`` is in seconds since 1970, ``seconds`` covers the
    asking, the sites' work and the collecting. ``capped``: examples that a site was counted with where its own number
    would have weighed too much. ``clipped``: length of a site's change that was shortened. ``quarantined``: sites that this round left out, for they had missed too many.
    ``excluded``: sites that could not take part in this round, and why; they were not asked.
    """

    kind: str
    round: int
    sequence: int
    sites_asked: list[str]
    sites_contributed: list[str]
    rejected: dict[str, str]
    abstained: list[str]
    timed_out: list[str]
    quarantined: list[str]
    excluded: dict[str, str]
    capped: dict[str, int]
    clipped: dict[str, float]
    attempts: int
    evaluated_round: int
    evaluation: Evaluation
    bytes_down: int
    bytes_up: int
    dense_bytes: int
    sparsity: float
    seconds: float
    committed_at: float

    @property
    def is_balanced(self) -> bool:
        """Every site asked is accounted for, once."""
        return sorted(self.sites_asked) == sorted(
            [*self.sites_contributed, *self.rejected, *self.abstained, *self.timed_out],
        )


@dataclass
class BestModel:
    """The best committed model so far by the task's metric; where it is ``sealed``, its weights cannot be read."""

    round: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    weights: Tensor | None = None
    mask: Mask | None = None
    encrypted: EncryptedValues | None = None


@dataclass(frozen=True)
class Snapshot(Generic[S]):
    """All that a run needs to go on after a commit as if nothing had happened."""

    state: S
    committed: int
    best: BestModel
    roster: Roster
    endpoint: ServerSnapshot
    records: list[RoundRecord]
    messages: list[LedgerLine]


@dataclass(frozen=True)
class Outcome:
    """The end of a run; where the model is ``sealed``, its weights cannot be read."""

    state: Any
    weights: Tensor
    mask: Mask
    evaluation: Evaluation
    best: BestModel
    rounds: list[RoundRecord]
    encrypted: EncryptedValues | None = None
