"""Ask, collect, check, commit, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..capabilities import Capabilities
from ..checkpoint.store import Store
from ..endpoints.server import ServerEndpoint
from ..errors import MissingBase, RoundFailed, SiteExcluded
from ..exchange import EVALUATE, Assignment, Contribution, EncryptedValues
from ..methods import Method
from ..task import Metric
from .census import Census, Handshake
from .learning import LearnResult, learn_from
from .records import BestModel, Evaluation, Outcome, RoundRecord, Snapshot
from .replies import AttemptResult, Transport, get_reason_code
from .rules import Roster, RoundRules


class Federation:
    """Runs one method over some sites.

    Args:
        method: the server half is used.
        endpoint: encodes, decodes, counts.
        metric: decides which model is best.
        rules: when a round counts.
        on_round: called with each record as its round is committed.
        store: receives a checkpoint with every commit; None: a crash loses the run.
        on_excluded: called with the reason for which a site cannot take part, once for each reason.
    """

    def __init__(
        self,
        method: Method[Any],
        endpoint: ServerEndpoint,
        metric: Metric,
        rules: RoundRules | None = None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        store: Store | None = None,
        on_excluded: Callable[[SiteExcluded], None] = lambda why: None,
    ):
        self.method, self.endpoint, self.metric = method, endpoint, metric
        self.rules, self.on_round, self.store = rules or RoundRules(), on_round, store
        self._best, self._roster = BestModel(), Roster()
        self._census = Census(None, on_excluded)
        self._on_excluded = on_excluded
        self._planned: dict[str, Capabilities] = {}
        self._silent: list[str] = []
        self._records: list[RoundRecord] = []

    def run(
        self,
        weights: Tensor,
        sites: Callable[[], list[str]],
        transport: Transport,
        *,
        handshake: Handshake | None = None,
        resume: bool = False,
    ) -> Outcome:
        """From the first question, or from the last checkpoint, to the last judgement.

        Args:
            weights: ``(P,)`` the initial model.
            sites: names of the sites present now.
            transport: carries questions and answers.
            handshake: asks sites what they can, before they are first asked anything; None: they can all that is asked.
            resume: go on from the newest checkpoint where there is one; otherwise those that are there are forgotten.

        Raises:
            RoundFailed: a round stayed below the quorum in every attempt; the last commit is intact.
            CheckpointError: a checkpoint could not be written, or is of another run.
        """
        self._census = Census(handshake, self._on_excluded)
        here = self._present(sites)
        state, committed = self.method.init(weights, here), 0
        if self.store is not None:
            state, committed = self._resumed(self.store, state) if resume else self._afresh(self.store, state)
            here = self._roster.select_available(here, self.rules)  # who rests is known only now
        while (requests := self._requests(state, here, sites)) is not None:
            record, learned = self._round(requests, transport, committed, partial(self._learned, state))
            self._consider(state, committed, record.evaluation)
            state, committed = learned.state, record.round
            self.endpoint.aggregate_encrypted(learned.updates)
            self._commit(record, state, committed)
            here = self._present(sites)
        last = self.method.ask_final(state, here)
        record, _ = self._round(last, transport, committed)
        if record.kind == EVALUATE:  # otherwise it is personal models that were judged
            self._consider(state, committed, record.evaluation)
        self._announce(self._sealed(record, state))
        model = self.method.model(state)
        return Outcome(
            state, model.to_vector(), model.mask, record.evaluation, self._best, self._records, self._unread()
        )

    def _requests(self, state: Any, here: list[str], sites: Callable[[], list[str]]) -> dict[str, Assignment] | None:
        """The method's next question. One to nobody is a failed attempt: others may be there in the next.

        Raises:
            RoundFailed: in no attempt there was anybody to ask.
        """
        for _ in range(self.rules.retries + 1):
            requests = self.method.ask(state, here)
            if requests is None or requests:
                return requests
            here = self._present(sites)
        raise RoundFailed(
            f"none of the sites present ({', '.join(here)}) has a part in what method {self.method.name} asks next, in "
            f"{self.rules.retries + 1} attempts: those that began the run must come back. The last committed model is intact."
        )

    def _present(self, sites: Callable[[], list[str]]) -> list[str]:
        """Who may be asked now; the method plans with what they can.

        Raises:
            RoundFailed: too few can take part.
        """
        for _ in range(self.rules.retries + 1):
            here = sites()
            awake = self._roster.select_available(
                [s for s in here if s not in self._census.incompatible_sites()], self.rules
            )
            admitted = self._census.admit(awake)
            if len(admitted) >= min(self.rules.min_sites, len(here)):
                self._silent = sorted(set(awake) - set(admitted))
                self._plan()
                return admitted
        raise RoundFailed(
            f"{len(admitted)} of {len(here)} sites can take part, {self.rules.min_sites} are needed: "
            + "; ".join(str(why) for _, why in sorted(self._census.out.items()))
        )

    def _plan(self) -> None:
        """The method as it can be carried out by the sites heard so far."""
        if self._census.capabilities != self._planned:
            self._planned = dict(self._census.capabilities)
            self.method = self.method.configured_for(self._planned)

    def _afresh(self, store: Store, state: Any) -> tuple[Any, int]:
        store.delete()
        return state, 0

    def _resumed(self, store: Store, start: Any) -> tuple[Any, int]:
        """State and round of the newest checkpoint; its rounds are announced again, as they were."""
        found = store.load(Snapshot[type(start)])  # type: ignore[misc]
        if found is None:
            return start, 0
        number, snapshot = found
        store.delete(number + 1)
        self._best, self._roster = snapshot.best, snapshot.roster
        self.endpoint.restore(snapshot.endpoint)
        self.endpoint.ledger.lines.extend(snapshot.messages)
        for record in snapshot.records:
            self._announce(record)
        return snapshot.state, snapshot.committed

    def _consider(self, state: Any, committed: int, evaluation: Evaluation) -> None:
        figure = evaluation.overall.get(self.metric.name)
        if figure is None:
            return
        if self._best.round < 0 or self.metric.is_better(figure, self._best.metrics[self.metric.name]):
            model = self.method.model(state)
            self._best = BestModel(committed, evaluation.overall, model.to_vector(), model.mask, self._unread())

    def _unread(self) -> EncryptedValues | None:
        """The model's values, where the server cannot read them."""
        return self.endpoint.encrypted.values if self.endpoint.encrypted else None

    def _commit(self, record: RoundRecord, state: Any, committed: int) -> None:
        """On the disk first, where there is one, then known to others."""
        record = self._sealed(record, state)
        if self.store is not None:
            records, messages = [*self._records, record], self.endpoint.ledger.lines
            content = Snapshot(state, committed, self._best, self._roster, self.endpoint.snapshot(), records, messages)
            self.store.save(record.sequence, content)
        self._announce(record)

    def _sealed(self, record: RoundRecord, state: Any) -> RoundRecord:
        on = self.method.model(state).mask
        return replace(record, sparsity=1 - on.count / max(on.size, 1), committed_at=time.time())

    def _announce(self, record: RoundRecord) -> None:
        self._records.append(record)
        self.on_round(record)

    def _round(
        self, requests: dict[str, Assignment], transport: Transport, judged: int, learn: _Learn | None = None
    ) -> tuple[RoundRecord, LearnResult]:
        """Ask until enough sites contribute; everything is validated before anything is summed.

        Args:
            requests: by site.
            transport: carries them.
            judged: round of the model that the sites judge.
            learn: what becomes of the answers; None: they are reports, and nothing is learned.

        Raises:
            RoundFailed: too few contributed in every attempt.
        """
        if not requests:
            raise RoundFailed(
                "none of the sites present has a part in the last question. The last committed model is intact."
            )
        began, first = time.monotonic(), len(self.endpoint.ledger.lines)
        requests, too_much = self._within_caps(requests)
        excluded = {site: str(why) for site, why in sorted({**self._census.out, **too_much}.items())}
        quarantined = sorted(self._roster.quarantined)
        for attempt in range(1, self.rules.retries + 2):
            tally = self._collect(requests, transport)
            seconds = time.monotonic() - began
            tally, learned = learn(tally, requests) if learn else (tally, LearnResult(None, []))
            counted = tally.contributed if learn else tally.answered
            if learned and self._enough(counted, requests):
                for site in [*tally.rejected, *tally.silent]:  # not before: a further attempt says the same bits
                    self.endpoint.forget_base(site)
                missed = [site for site in self._silent if site not in quarantined]
                self._roster.record_round([u.site for u in tally.answered], [*requests, *missed], self.rules)
                facts = _Facts(requests, [u.site for u in counted], judged, attempt, quarantined, excluded, learned)
                return self._record(tally, facts, self.endpoint.ledger.lines[first:], seconds), learned
        raise RoundFailed(
            f"round {tally.question.round} ({tally.question.kind}): {len(counted)} of {len(requests)} sites contributed "
            f"in the last of {self.rules.retries + 1} attempts, {self.rules.min_sites} are needed"
            f"{self._weight_needed()}; rejected: {tally.rejected or 'none'}, silent: {tally.silent or 'none'}. "
            "The last committed model is intact."
        )

    def _learned(
        self, state: Any, tally: AttemptResult, requests: Mapping[str, Assignment]
    ) -> tuple[AttemptResult, LearnResult | None]:
        return learn_from(
            tally, state, self.method, self.endpoint, self.rules, partial(self._enough, requests=requests)
        )

    def _within_caps(self, requests: dict[str, Assignment]) -> tuple[dict[str, Assignment], dict[str, SiteExcluded]]:
        """The requests that sites can answer within their upload caps, and why the others are not asked.

        Raises:
            RoundFailed: too few are left.
        """
        too_much = self._census.find_over_cap(requests, self.endpoint)
        asked = {site: request for site, request in requests.items() if site not in too_much}
        if too_much and len(asked) < max(1, min(self.rules.min_sites, len(requests))):
            raise RoundFailed(
                f"{len(asked)} of {len(requests)} sites can answer, {self.rules.min_sites} are needed: "
                + "; ".join(str(why) for _, why in sorted(too_much.items()))
            )
        return asked, too_much

    def _enough(self, counted: list[Contribution], requests: Mapping[str, Assignment]) -> bool:
        """The quorum, by sites and by weight; nobody is never enough."""
        if not counted or len(counted) < min(self.rules.min_sites, len(requests)):
            return False
        share = self._roster.compute_share([u.site for u in counted], requests.keys(), self.rules.max_share)
        return share >= self.rules.min_weight

    def _weight_needed(self) -> str:
        wanted = self.rules.min_weight
        return f" with {wanted:.0%} of the examples of the sites asked" if wanted else ""

    def _record(self, tally: AttemptResult, facts: _Facts, lines: list[Any], seconds: float) -> RoundRecord:
        """The record of a round; ``lines`` are its messages, earlier attempts included."""
        record = RoundRecord(
            kind=tally.question.kind,
            round=tally.question.round,
            sequence=tally.question.sequence,
            sites_asked=sorted(facts.requests),
            sites_contributed=facts.counted,
            rejected=tally.rejected,
            abstained=[u.site for u in tally.answered if u.site not in set(facts.counted)],
            timed_out=tally.silent,
            quarantined=facts.quarantined,
            excluded=facts.excluded,
            capped=facts.learned.capped,
            clipped=facts.learned.clipped,
            attempts=facts.attempt,
            evaluated_round=facts.judged,
            evaluation=Evaluation.from_updates(tally.answered, self.rules.max_share),
            bytes_down=sum(line.payload_bytes for line in lines if line.direction == "down"),
            bytes_up=sum(line.payload_bytes for line in lines if line.direction == "up"),
            dense_bytes=sum(line.dense_bytes for line in lines),
            sparsity=0.0,
            seconds=seconds,
            committed_at=0.0,
        )
        if not record.is_balanced:
            raise RoundFailed(f"round {record.round}: the sites asked and what became of them do not balance: {record}")
        return record

    def _collect(self, requests: dict[str, Assignment], transport: Transport) -> AttemptResult:
        """One question; sites that lost what they held are sent everything, once, in the same round."""
        question = self.endpoint.ask(requests)
        replies = {site: reply for site, reply in transport(question).items() if site in requests}
        lost = {site: requests[site] for site, reply in replies.items() if isinstance(reply, MissingBase)}
        for site in lost:
            self.endpoint.forget_base(site)
        if lost:
            question = self.endpoint.ask(lost)
            replies |= transport(question)
        for site, reply in replies.items():
            if isinstance(reply, Contribution) and (code := self._roster.find_violation(reply, self.rules)):
                replies[site] = code
        for site in self.endpoint.find_sites_with_wrong_key(
            [reply for reply in replies.values() if isinstance(reply, Contribution)]
        ):
            replies[site] = "E_KEY"
        rejected = {
            site: get_reason_code(reply) for site, reply in replies.items() if not isinstance(reply, Contribution)
        }
        silent = sorted(set(requests) - set(replies))
        answered = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Contribution)]
        return AttemptResult(question, answered, rejected, silent)


_Learn = Callable[[AttemptResult, Mapping[str, Assignment]], tuple[AttemptResult, LearnResult | None]]


@dataclass(frozen=True)
class _Facts:
    """What the loop knows of a round beside the tally."""

    requests: Mapping[str, Assignment]
    counted: list[str]
    judged: int
    attempt: int
    quarantined: list[str]
    excluded: dict[str, str]
    learned: LearnResult
