"""One round: attempts until the quorum is met, and from the replies of the last one to the next state of the method."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from ...core.errors import MissingBase, RoundFailed, UndefinedScores
from ...core.exchange import Assignment, Contribution, Patch
from ...methods.aggregation.weighted import clip_deltas
from ...methods.method import Method
from ...tasks.task import EPSILON
from ...wire.formats import FORMATS, ValueType
from ...wire.stage import Reply
from ..endpoints.events import BASE_LOST, EventLog
from ..endpoints.server import Attempt, ServerEndpoint
from .records import RoundRecord
from .roster import Roster
from .rules import RoundRules, SiteHistory, cap_contributions


@dataclass(frozen=True)
class AttemptResult:
    """The replies to one attempt. Each site asked is in exactly one of the last three fields.

    Attributes:
        attempt: the attempt; after the loss of a base, the one that sent the full model.
        accepted: accepted contributions in site-name order, with and without values.
        rejected: reason codes by site.
        timed_out: sites that did not reply.
        counts_empty: sites of which an update with an empty selection contributes a delta of zero.
        total: contribution that stands for all others, whose values the server cannot read; None: it reads each.
        failure: why the server could not read the values; empty: it could.
    """

    attempt: Attempt
    accepted: list[Contribution]
    rejected: dict[str, str]
    timed_out: list[str]
    counts_empty: frozenset[str] = frozenset()
    total: Contribution | None = None
    failure: str = ""

    def drop_values(self) -> AttemptResult:
        """Return the result without values, as a record of an attempt that has failed."""
        if not self.accepted:
            return self
        empty = Patch.empty(self.accepted[0].patch.mask.size)
        accepted = [replace(contribution, patch=empty) for contribution in self.accepted]
        return replace(self, accepted=accepted, total=None)

    @property
    def contributed(self) -> list[Contribution]:
        """Contributions that a method can learn from: with values or a delta of zero, and with a positive weight."""
        # Weight 0 would add nothing to a sum but would count towards the quorum, and alone would divide by zero.
        return [
            contribution
            for contribution in self.accepted
            if contribution.content != "metrics"
            and contribution.num_examples
            and (contribution.patch.mask.count or contribution.site in self.counts_empty)
        ]

    def reject(self, site: str, code: str) -> AttemptResult:
        """Return the result with the contribution of ``site`` rejected for ``code``."""
        accepted = [contribution for contribution in self.accepted if contribution.site != site]
        return replace(self, accepted=accepted, rejected={**self.rejected, site: code})


def get_reason_code(reply: Exception | str) -> str:
    """Return the code of a rejection: the error's own, or else the name of its type."""
    return reply if isinstance(reply, str) else str(getattr(reply, "code", type(reply).__name__))


FEWEST = 3
"""With fewer updates than this, the median does not tell which of them is the outlier."""


def reject_outliers(result: AttemptResult, get_previous: Callable[[], Patch], max_ratio: float | None) -> AttemptResult:
    """Reject the updates with a delta longer than ``max_ratio`` times the median of the round's deltas.

    Args:
        result: replies of an attempt.
        get_previous: returns the model that the sites started from; called only if an update holds weights.
        max_ratio: largest ratio; None: no bound.

    Returns:
        The replies; an outlier is rejected with ``E_NORM``. Values are never changed: the other updates keep their
        bits. Summed updates and scores are not examined.
    """
    # Values that are summed unread are NaN at the server.
    contributed = [] if result.total is not None else result.contributed
    examined = [contribution for contribution in contributed if contribution.content in ("weights", "delta")]
    if max_ratio is None or len(examined) < FEWEST:
        return result
    get_model = cache(get_previous)
    # Sites that choose their own entries share one vector of the model.
    get_vector = cache(lambda: get_model().to_vector())
    norms = {contribution.site: _compute_norm(contribution, get_model, get_vector) for contribution in examined}
    typical = median(norms.values())
    # A median of zero: most sites sent nothing, and any update is infinitely longer.
    if not typical:
        return result
    # "not <=" and not ">", which NaN, the norm of inf - inf, would pass.
    for site in sorted(site for site, norm in norms.items() if not norm <= max_ratio * typical):
        result = result.reject(site, "E_NORM")
    return result


def _compute_norm(
    contribution: Contribution, get_model: Callable[[], Patch], get_vector: Callable[[], Tensor]
) -> float:
    """Return the L2 norm of a contribution's delta, infinite if it overflows float32.

    Args:
        contribution: weights or a delta.
        get_model: returns the model that the site started from; called only for weights.
        get_vector: returns the vector ``(P,)`` of that model; called only for weights with a mask of their own.
    """
    values, mask = contribution.patch.values, contribution.patch.mask
    if contribution.content == "weights":
        model = get_model()
        # With the model's own mask, as in most methods, the cost follows the number of live entries.
        values = values - (model.values if mask == model.mask else mask.take(get_vector()))
    return float(torch.linalg.vector_norm(values))


HasQuorum = Callable[[Sequence[Contribution]], bool]
"""Whether a round may be committed with these contributions."""


@dataclass(frozen=True)
class LearnResult:
    """Result of learning from a round.

    Attributes:
        state: the method's state after the round.
        capped: weight of each site that counts with fewer examples than it reported.
        clipped: L2 norm of a site's delta before it was clipped.
    """

    state: Any
    capped: dict[str, int] = field(default_factory=dict)
    clipped: dict[str, float] = field(default_factory=dict)


def learn_from(
    result: AttemptResult,
    state: Any,
    method: Method[Any, Any],
    values: ValueType,
    rules: RoundRules,
    has_quorum: HasQuorum,
) -> tuple[AttemptResult, LearnResult | None]:
    """Compute the next state; until it can be sent, reject the contribution with the largest norm.

    Args:
        result: replies of the attempt.
        state: the method's state before the round.
        method: computes the next state.
        values: number format of messages, which the next model must fit.
        rules: limits of a site's weight and delta.
        has_quorum: whether given contributions meet the quorum.

    Returns:
        The replies, with rejected contributions moved; and what was learned, None below the quorum.
    """
    # With clip_norm, a longer delta is clipped instead and counts.
    if rules.clip_norm is None:
        result = reject_outliers(result, lambda: method.model(state), rules.max_norm_ratio)
    # Each contribution is finite, but their sum or a factorization may not be. A model that cannot be encoded would
    # stop the run in the next round, so this is checked before the commit, and the likeliest cause is rejected.
    while has_quorum(result.contributed):
        contributions, capped = cap_contributions(result.contributed, rules.max_share)
        # Only clipping needs the model as a vector of P floats.
        previous = Tensor() if rules.clip_norm is None else method.model(state).to_vector()
        contributions, clipped = clip_deltas(contributions, previous, rules.clip_norm)
        learned = contributions if result.total is None else [result.total]
        next_state = _compute_state(method, values, state, learned)
        if next_state is not None:
            return result, LearnResult(next_state, capped, clipped)
        # Of a sum, no single contribution can be rejected: the attempt has failed.
        if result.total is not None:
            return result, None
        # Compute in float64, since the square of a large float32 overflows.
        largest = max(result.contributed, key=lambda c: float(torch.linalg.vector_norm(c.patch.values.double())))
        result = result.reject(largest.site, "E_RANGE")
    return result, None


def _compute_state(method: Method[Any, Any], values: ValueType, state: Any, contributions: list[Contribution]) -> Any:
    """Return the state after a round, or None if the contributions' values do not let it be computed or sent.

    Raises:
        SelectionError: the settings cannot be met, whatever the sites send; rejecting a site would not help.
    """
    try:
        next_state = method.learn(state, contributions)
    # Values near the largest float32 can break a decomposition or a selection, which counts as a state with infinities.
    except (ArithmeticError, UndefinedScores, torch.linalg.LinAlgError):  # type: ignore[attr-defined]
        return None
    return next_state if FORMATS[values].can_hold(method.model(next_state).values) else None


@dataclass(frozen=True)
class Round:
    """A round that met its quorum.

    Attributes:
        last: replies of the last attempt.
        record: returns the record of the round, given what only the commit tells.
        learned: the next state; None if the round only evaluates.
        history: history after the round.
    """

    last: AttemptResult
    record: Callable[..., RoundRecord]
    learned: LearnResult | None
    history: SiteHistory


DIVERGENCE_CODES = frozenset({"E_DIVERGED", "E_FINITE", "E_METRICS"})
"""Codes with which a site answers that cannot compute with the model that it received."""
PERSONAL_DIVERGENCE_CODES = frozenset({"E_PERSONAL"})
"""Codes with which a site answers whose own training after the last round diverged from a sound model."""


class QuorumMissed(RoundFailed):
    """A round stayed below the quorum in every attempt.

    Attributes:
        result: replies of the last attempt.
    """

    def __init__(self, text: str, result: AttemptResult):
        super().__init__(text)
        self.result = result

    def list_majority(self, codes: frozenset[str]) -> list[str]:
        """Return the sites rejected with one of the codes, if they are more than half of the sites that replied."""
        replied = len(self.result.accepted) + len(self.result.rejected)
        sites = sorted(site for site, code in self.result.rejected.items() if code in codes)
        # A minority must not be able to discard a commit of the others by claiming to diverge.
        return sites if len(sites) > replied / 2 else []


class RoundRunner:
    """Runs rounds over the sites of a roster.

    Args:
        endpoint: encodes requests and validates updates.
        rules: quorum, retries and limits of a round.
        roster: excludes sites with an upload cap that is too small, and knows how to reach the others.
        events: receives what sites report and which of them lost their base.
    """

    def __init__(self, endpoint: ServerEndpoint, rules: RoundRules, roster: Roster, events: EventLog):
        self.endpoint, self.rules, self.roster, self.events = endpoint, rules, roster, events
        self.connections = roster.connections

    def run(
        self,
        assignments: Mapping[str, Assignment],
        history: SiteHistory,
        method: Method[Any, Any] | None = None,
        state: Any = None,
    ) -> Round:
        """Send requests until enough sites contribute. Every update is validated before any is aggregated.

        Args:
            assignments: by site.
            history: history before the round.
            method: computes the next state; None: the round only evaluates, and every accepted update counts.
            state: the method's state before the round.

        Raises:
            RoundFailed: no site has a part in the request, or too few contributed in every attempt.
        """
        if not assignments:
            raise RoundFailed(
                "none of the connected sites has a part in the last request. The last committed model is intact."
            )
        rules = self.rules
        if method is None or all(each.expected.content == "scores" for each in assignments.values()):
            # An evaluation commits no model, and some methods take scores from one designated site: the sites that
            # have a part in such a round suffice.
            rules = rules.model_copy(update={"min_sites": min(rules.min_sites, len(assignments))})
        _require_enough_asked(assignments, rules)
        # Upload caps are checked before anything is sent: a site must not train for an update that it may not upload.
        start, first_message = time.monotonic(), len(self.endpoint.ledger.lines)
        assignments, over_cap = self.roster.exclude_over_cap(assignments, self.endpoint)
        excluded = {site: str(reason) for site, reason in sorted({**self.roster.excluded, **over_cap}.items())}
        # A quarantined site is asked after another hello, or if too few others remain.
        quarantined = sorted(site for site in history.quarantined if site not in assignments)
        for attempt_number in range(1, self.rules.retries + 2):
            result, history = self._collect(assignments, history)
            # Measured before aggregation: the record gives the time of sites and network, without that of the server.
            seconds = time.monotonic() - start
            has_quorum = _build_quorum(history, assignments, rules)
            learned: LearnResult | None = None
            if method is not None:
                result, learned = learn_from(result, state, method, self.endpoint.values, self.rules, has_quorum)
            contributions = result.contributed if method else result.accepted
            # The quorum is checked again: learning rejects contributions that make the next state unusable.
            if (learned or not method) and has_quorum(contributions):
                # Bases are forgotten only now that the round is decided: a retry must encode the same bits as the
                # previous attempt, so a missed attempt must not change the base that the server assumes at a site.
                for site in [*result.rejected, *result.timed_out]:
                    self.endpoint.forget_base(site)
                # A quarantined site is contacted only if too few others remain: its silence is not another miss.
                silent_active = [site for site in self.roster.silent if site not in quarantined]
                accepted = [contribution.site for contribution in result.accepted]
                contributed = [contribution.site for contribution in contributions]
                messages = self.endpoint.ledger.lines[first_message:]
                record = partial(
                    RoundRecord,
                    kind=result.attempt.kind,
                    round=result.attempt.round,
                    sequence=result.attempt.sequence,
                    sites_asked=sorted(assignments),
                    sites_contributed=contributed,
                    rejected=result.rejected,
                    abstained=[site for site in accepted if site not in set(contributed)],
                    timed_out=result.timed_out,
                    quarantined=quarantined,
                    excluded=excluded,
                    capped=learned.capped if learned else {},
                    clipped=learned.clipped if learned else {},
                    attempts=attempt_number,
                    bytes_down=sum(line.payload_bytes for line in messages if line.direction == "down"),
                    bytes_up=sum(line.payload_bytes for line in messages if line.direction == "up"),
                    dense_bytes=sum(line.dense_bytes for line in messages),
                    seconds=seconds,
                    spent_epsilon={
                        update.site: update.metrics[EPSILON] for update in result.accepted if EPSILON in update.metrics
                    },
                )
                history = history.record_round(accepted, [*assignments, *silent_active], self.rules)
                return Round(result, record, learned, history)
            # The next attempt has updates of its own: those of this one must not stay in memory beside them.
            result = result.drop_values()
            num_contributed = len(contributions)
            del contributions
        raise QuorumMissed(self._describe_failure(result, num_contributed, len(assignments)), result)

    def _collect(
        self, assignments: Mapping[str, Assignment], history: SiteHistory
    ) -> tuple[AttemptResult, SiteHistory]:
        """Make one attempt and return its replies, and the history with newly registered numbers of examples."""
        deadline = None if self.rules.round_s is None else time.monotonic() + self.rules.round_s
        attempt = self.endpoint.encode_requests(assignments)
        replies = self._send(attempt, deadline, assignments)
        # A site that lost its base (after a crash of its process or disk) receives the full model within the same
        # attempt, once: it costs one more message, and the site still takes part in the round.
        lost_base = {site: assignments[site] for site, reply in replies.items() if isinstance(reply, MissingBase)}
        for site in lost_base:
            self.endpoint.forget_base(site)
            self.events.add(
                site,
                BASE_LOST,
                f"the site did not hold the model that message {attempt.sequence} builds on; the full model was sent",
            )
        if lost_base:
            attempt = self.endpoint.encode_requests(lost_base)
            # Within the same deadline: an attempt must not last twice as long because one site lost its base.
            replies |= self._send(attempt, deadline, lost_base)
        for site, reply in replies.items():
            if not isinstance(reply, Contribution):
                continue
            # Registered now and not at the commit: a site must not change its number of examples in a retry.
            violation = history.find_violation(reply, self.rules)
            if violation:
                replies[site] = violation
            else:
                history = history.register(reply)
        accepted = [reply for reply in replies.values() if isinstance(reply, Contribution)]
        self.events.add_reports(sorted(accepted, key=lambda contribution: contribution.site))
        transport = self.connections.exchange_steps
        opened = self.endpoint.stage.open(assignments, attempt.sequence, replies, transport, deadline)
        result = _group_replies(attempt, assignments, opened.replies)
        return replace(result, total=opened.total, failure=opened.failure), history

    def _send(
        self, attempt: Attempt, deadline: float | None, assignments: Mapping[str, Assignment]
    ) -> dict[str, Reply]:
        """Return the replies of the sites asked that arrive before the deadline."""
        if deadline is not None:
            attempt = replace(attempt, seconds=max(deadline - time.monotonic(), 0.0))
        return {site: reply for site, reply in self.connections.exchange(attempt).items() if site in assignments}

    def _describe_failure(self, result: AttemptResult, contributed: int, asked: int) -> str:
        rejected = [f"{site} {code}" for site, code in sorted(result.rejected.items())]
        safe = "The last committed model is intact." if result.attempt.round > 1 else "No round was committed."
        failed = f"The sum failed: {result.failure}. " if result.failure else ""
        by_weight = f" with {self.rules.min_weight:.0%} of the examples of the sites asked"
        return (
            f"round {result.attempt.round} ({result.attempt.kind}): {contributed} of {asked} sites contributed in the "
            f"last of {self.rules.retries + 1} attempts, {self.rules.min_sites} are needed"
            f"{by_weight if self.rules.min_weight else ''}; rejected: {_join_or_none(rejected)}; timed out: "
            f"{_join_or_none(result.timed_out)}. {failed}{safe}"
        )


def _join_or_none(items: Iterable[str]) -> str:
    return ", ".join(items) or "none"


def _require_enough_asked(assignments: Mapping[str, Assignment], rules: RoundRules) -> None:
    """Raise if a round asks fewer sites than it needs: no reply could make up for that.

    Raises:
        RoundFailed: the method asks too few sites.
    """
    if len(assignments) < rules.min_sites:
        request = next(iter(assignments.values())).request
        raise RoundFailed(
            f"round {request.round} ({request.kind}): federation.min_sites is {rules.min_sites}, but the method asks "
            f"only {len(assignments)} of the sites to contribute: {', '.join(sorted(assignments))}. Lower "
            "federation.min_sites, raise method.participation or add sites. The last committed model is intact."
        )


def _build_quorum(history: SiteHistory, assignments: Mapping[str, Assignment], rules: RoundRules) -> HasQuorum:
    return lambda counted: history.has_quorum(
        [contribution.site for contribution in counted], assignments.keys(), rules
    )


def _group_replies(
    attempt: Attempt, assignments: Mapping[str, Assignment], replies: Mapping[str, Reply]
) -> AttemptResult:
    """Group replies into accepted and rejected ones; sort them by site: the order of arrival must not change sums."""
    return AttemptResult(
        attempt,
        accepted=[reply for _, reply in sorted(replies.items()) if isinstance(reply, Contribution)],
        rejected={
            site: get_reason_code(reply) for site, reply in replies.items() if not isinstance(reply, Contribution)
        },
        timed_out=sorted(set(assignments) - set(replies)),
        counts_empty=frozenset(site for site, assignment in assignments.items() if assignment.expected.counts_empty),
    )
