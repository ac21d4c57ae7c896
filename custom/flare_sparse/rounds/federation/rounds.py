"""One round: attempts until the quorum is met."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import MissingBase, RoundFailed
from ...core.exchange import Assignment, Contribution
from ...methods.method import Method
from ...tasks.task import EPSILON
from ...wire.stage import Reply
from ..endpoints.events import BASE_LOST, EventLog
from ..endpoints.server import Attempt, ServerEndpoint
from .learning import HasQuorum, LearnResult, learn_from
from .records import RoundRecord
from .roster import AttemptResult, Roster, get_reason_code
from .rules import RoundRules, SiteHistory


@dataclass(frozen=True)
class Round:
    """A round that met its quorum.

    Attributes:
        last: replies of the last attempt.
        record: what is known before the commit.
        learned: the next state; None if the round only evaluates.
        history: history after the round.
    """

    last: AttemptResult
    record: RoundRecord
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
                record = RoundRecord(
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
