"""What is known of a round, and of the end of a run: metrics, the best model, who contributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...cohorts.subgroups import split_metric
from ...core.exchange import EVALUATE, Contribution, Patch
from ...core.mask import Mask
from ...methods.aggregation.weighted import cap
from ...tasks.task import COUNTS, EPSILON, TEST_EXAMPLES, get_count_name
from ..endpoints.events import Event


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model.

    Attributes:
        overall: over the test examples of all sites, and with the prefix ``validation_`` over the validation examples.
        sites: by site; those of a site without test and validation examples are empty.
    """

    overall: dict[str, float]
    sites: dict[str, dict[str, float]]

    @classmethod
    def from_contributions(cls, contributions: Sequence[Contribution], max_share: float = 1.0) -> Evaluation:
        """Return the means of the sites' metrics, weighted by test or validation examples.

        For metrics that are means over examples, such as MAE and accuracy, this is the value over all examples. For
        others, such as AUC, it is a mean of values within sites; predictions of single examples never reach the server.

        Args:
            contributions: contributions, with or without metrics.
            max_share: largest share of a mean that one site may have.
        """
        reported = {
            contribution.site: {name: value for name, value in contribution.metrics.items() if name != EPSILON}
            for contribution in contributions
        }
        # No site reports metrics with scores. Otherwise a site without any has no test examples, and stays visible.
        return cls._from_site_metrics(reported if any(reported.values()) else {}, max_share)

    @classmethod
    def _from_site_metrics(cls, sites: Mapping[str, dict[str, float]], max_share: float) -> Evaluation:
        names = {name for metrics in sites.values() for name in metrics} - set(COUNTS)
        # Those of subgroups are weighted by the subjects of the subgroup, where a report reads them by site.
        names = {name for name in names if split_metric(name) is None}
        overall = {}
        for name in sorted(names):
            # A site may lack a metric, such as the AUC of a single class: its examples do not count then.
            present = [metrics for metrics in sites.values() if name in metrics]
            weights = _cap_examples(present, get_count_name(name), max_share)
            weighted = sum(metrics[name] * weight for metrics, weight in zip(present, weights, strict=True))
            overall[name] = weighted / sum(weights)
        for count in COUNTS:
            present = [metrics for metrics in sites.values() if any(get_count_name(name) == count for name in metrics)]
            if present or (sites and count == TEST_EXAMPLES):
                overall[count] = sum(_cap_examples(present, count, max_share))
        return cls(overall, dict(sites))

    def select_sites(self, sites: Collection[str], max_share: float = 1.0) -> Evaluation:
        """Return the evaluation at some of the sites."""
        selected = {site: metrics for site, metrics in self.sites.items() if site in sites}
        return self._from_site_metrics(selected, max_share)

    def list_sites_with(self, name: str) -> set[str]:
        """Return the sites that reported a metric."""
        return {site for site, metrics in self.sites.items() if name in metrics}

    def count_examples(self, name: str) -> float:
        """Return the number of examples that a metric was computed from, over all sites."""
        return sum(self.sites[site].get(get_count_name(name), 1.0) for site in self.list_sites_with(name))


def _cap_examples(metrics: list[dict[str, float]], count: str, max_share: float) -> list[float]:
    """Return the number of examples that each site's metrics are weighted by."""
    return cap([values.get(count, 1.0) for values in metrics], max_share)


@dataclass(frozen=True)
class BestModel:
    """The best committed model so far by the task's metric on the validation examples of all sites.

    Test examples choose nothing: a metric on examples that chose the model is too good.

    Attributes:
        round: round of the model; -1: no model was evaluated on validation examples.
        evaluation: metrics of the model.
        model: the model, over zeros; None: none was evaluated yet.
    """

    round: int = -1
    evaluation: Evaluation = field(default_factory=lambda: Evaluation({}, {}))
    model: Patch | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Overall metrics."""
        return self.evaluation.overall


CONTRIBUTED = "contributed"


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """What is known when a round is committed; one line of ``rounds.jsonl``.

    Every site asked is in exactly one of ``sites_contributed``, ``rejected``, ``abstained`` and ``timed_out``.

    Attributes:
        kind: kind of the requests.
        round: 1-based; 0 before training.
        sequence: number of the last attempt.
        sites_asked: sites that received a request.
        sites_contributed: sites whose contribution counts.
        rejected: reason codes by site.
        abstained: sites that replied without values.
        timed_out: sites that did not reply in time.
        quarantined: sites in quarantine after repeated misses.
        excluded: reasons by site, of sites that could not take part and were not asked.
        capped: number of examples that a site was counted with, where its own would have weighed too much.
        clipped: L2 norm of a site's delta before it was clipped.
        attempts: number of attempts.
        evaluated_round: the round whose model ``evaluation`` is of: the one that this round started from. The model of
            the last round is evaluated after all rounds.
        evaluation: the sites' metrics.
        bytes_down: payload bytes of all requests, earlier attempts included.
        bytes_up: payload bytes of all updates, earlier attempts included.
        dense_bytes: bytes of the same messages if all entries were sent.
        sparsity: share of the entries that are off in the committed model.
        seconds: time for requests, the sites' work and the replies.
        committed_at: seconds since 1970.
        events: damages, dropped memories and the like since the previous record, at the server and at the sites.
        spent_epsilon: by site, what the run has charged its subjects so far; empty without differential privacy.
        figures: what the method measures of the server's step, by name.
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
    events: list[Event] = field(default_factory=list)
    spent_epsilon: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def outcomes(self) -> dict[str, str]:
        """``"contributed"``, or the reason why not, of every site asked or left out."""
        # Later entries replace earlier ones: a quarantined site is asked all the same where too few others remain.
        return {
            **dict.fromkeys(self.quarantined, "quarantined"),
            **dict.fromkeys(self.excluded, "excluded"),
            **dict.fromkeys(self.timed_out, "timed_out"),
            **dict.fromkeys(self.abstained, "abstained"),
            **self.rejected,
            **dict.fromkeys(self.sites_contributed, CONTRIBUTED),
        }

    @property
    def is_balanced(self) -> bool:
        """Whether every site asked has exactly one outcome."""
        return sorted(self.sites_asked) == sorted(
            [*self.sites_contributed, *self.rejected, *self.abstained, *self.timed_out]
        )


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        state: the method's last state.
        weights: ``(P,)`` the last model.
        mask: live entries of the last model.
        evaluation: of the last model, or of the sites' personal models.
        best: best committed model.
        rounds: records of all rounds.
        sites: sites that were connected at any time or are expected by the settings.
        stopped_after: round after which early stopping ended the run; None: it ran all rounds.
        examples: number of training examples (n_k) by site that had an update accepted.
    """

    state: Any
    weights: Tensor
    mask: Mask
    evaluation: Evaluation
    best: BestModel
    rounds: list[RoundRecord]
    sites: list[str] = field(default_factory=list)
    stopped_after: int | None = None
    examples: dict[str, int] = field(default_factory=dict)

    @property
    def events(self) -> list[Event]:
        """Events of all rounds."""
        return [event for record in self.rounds for event in record.events]

    def count_contributions(self) -> dict[str, Participation]:
        """Return how each site took part in the rounds that changed the model, in name order."""
        # The record after the last round only evaluates; where it is the only one, the sites train in answer to it.
        rounds = [record for record in self.rounds[:-1] if record.kind != EVALUATE] or self.rounds[-1:]
        names = {*self.sites, *(site for record in rounds for site in record.outcomes)}
        return {site: Participation.from_records(site, rounds) for site in sorted(names)}


@dataclass(frozen=True)
class Participation:
    """How one site took part in the rounds that changed the model.

    Attributes:
        asked: rounds in which the site received a request.
        contributed: rounds in which its contribution counted.
        missed: rounds without its contribution, by reason: an error code, ``"timed_out"``, ``"abstained"``,
            ``"excluded"`` or ``"quarantined"``.
    """

    asked: int = 0
    contributed: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)

    @property
    def expected(self) -> int:
        """Number of rounds that the site was to contribute to; 0 for a site that the method only evaluates."""
        return self.contributed + sum(self.missed.values())

    @property
    def is_idle(self) -> bool:
        """Whether the site was to contribute and did so in no round."""
        return self.expected > 0 and not self.contributed

    def describe_missed(self) -> str:
        """Return why the site did not contribute.

        >>> Participation(4, 1, {"timed_out": 1, "E_DATA": 2}).describe_missed()
        '2 x E_DATA, 1 x timed out'
        """
        words = {reason: reason if reason.startswith("E_") else reason.replace("_", " ") for reason in self.missed}
        return ", ".join(f"{count} x {words[reason]}" for reason, count in sorted(self.missed.items()))

    @classmethod
    def from_records(cls, site: str, records: Sequence[RoundRecord]) -> Participation:
        """Return the participation of ``site`` in the rounds of ``records``."""
        outcomes = Counter(record.outcomes[site] for record in records if site in record.outcomes)
        # Not the number of outcomes: an excluded or quarantined site has an outcome without a request.
        asked = sum(site in record.sites_asked for record in records)
        return cls(asked, outcomes.pop(CONTRIBUTED, 0), dict(sorted(outcomes.items())))
