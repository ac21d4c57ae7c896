"""The rounds of a run: ask, collect, check, commit, judge. The rehearsal and FLARE's controller both run this loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from .errors import NotHeld, RoundFailed
from .exchange import VALIDATE, Request, Update
from .mask import Mask
from .methods import Method
from .server import Question, ServerDesk
from .task import Metric

Reply = Update | Exception | str
"""What became of a site's answer: an update, the error it was rejected with, or a short reason code."""
Transport = Callable[[Question, "ServerDesk"], Mapping[str, Reply]]
"""Takes a question to its sites and brings back what each one answered; sites that miss are absent."""


@dataclass(frozen=True)
class Rules:
    """When a round counts.

    Attributes:
        min_sites: fewest contributions that a round may be committed with.
        retries: times a round is asked again before the run stops.
    """

    min_sites: int = 1
    retries: int = 2


@dataclass(frozen=True)
class Judgement:
    """Metrics of one model: over all test examples, and per site."""

    overall: dict[str, float]
    sites: dict[str, dict[str, float]]

    @classmethod
    def of(cls, updates: list[Update]) -> Judgement:
        """Means weighted by test examples (the pooled value for means such as MAE and accuracy)."""
        sites = {u.site: u.metrics for u in updates if u.metrics}
        total = sum(m.get("test_examples", 1.0) for m in sites.values())
        names = sorted({n for m in sites.values() for n in m} - {"test_examples"})
        overall = {}
        for name in names:
            having = [m for m in sites.values() if name in m]
            weight = sum(m.get("test_examples", 1.0) for m in having)
            overall[name] = sum(m[name] * m.get("test_examples", 1.0) for m in having) / weight
        return cls({**overall, "test_examples": total} if sites else {}, sites)


@dataclass(frozen=True)
class RoundRecord:
    """What is known when a round has been committed; one line of ``rounds.jsonl``.

    ``judgement`` is of the model that the round started from (``judged_round``); the model it ends with is judged in
    the next round, the last one after all rounds. ``committed_at`` is in seconds since 1970, ``seconds`` covers the
    asking, the sites' work and the collecting.
    """

    kind: str
    round: int
    sequence: int
    sites_asked: list[str]
    sites_in: list[str]
    rejected: dict[str, str]
    abstained: list[str]
    timed_out: list[str]
    attempts: int
    judged_round: int
    judgement: Judgement
    bytes_down: int
    bytes_up: int
    dense_bytes: int
    sparsity: float
    seconds: float
    committed_at: float


@dataclass
class Best:
    """The best committed model so far by the task's metric."""

    round: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    weights: Tensor | None = None
    mask: Mask | None = None


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    state: Any
    weights: Tensor
    mask: Mask
    judgement: Judgement
    best: Best
    rounds: list[RoundRecord]


class Federation:
    """Runs one method over some sites.

    Args:
        method: the server half is used.
        desk: encodes, decodes, counts.
        metric: decides which model is best.
        rules: when a round counts.
        on_round: called with each record as its round is committed.
    """

    def __init__(
        self,
        method: Method[Any],
        desk: ServerDesk,
        metric: Metric,
        rules: Rules | None = None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
    ):
        self.method, self.desk, self.metric = method, desk, metric
        self.rules, self.on_round = rules or Rules(), on_round
        self._best = Best()
        self._records: list[RoundRecord] = []

    def run(self, weights: Tensor, sites: Callable[[], list[str]], transport: Transport) -> Outcome:
        """From the first question to the last judgement.

        Args:
            weights: ``(P,)`` the initial model.
            sites: names of the sites present now.
            transport: carries questions and answers.

        Raises:
            RoundFailed: a round stayed below ``min_sites`` in every attempt; ``state`` is the last commit's.
        """
        state = self.method.init(weights, sites())
        committed = 0
        while (requests := self.method.ask(state, sites())) is not None:
            record, updates = self._round(requests, transport, committed)
            self._consider(state, committed, record.judgement)
            state = self.method.learn(state, updates)
            committed = record.round
            self._commit(record, state)
        record, _ = self._round(self.method.judge(state, sites()), transport, committed, reporting=True)
        if record.kind == VALIDATE:  # otherwise it is personal models that were judged
            self._consider(state, committed, record.judgement)
        self._commit(record, state)
        model = self.method.model(state)
        return Outcome(state, model.vector(), model.on, record.judgement, self._best, self._records)

    def _consider(self, state: Any, committed: int, judgement: Judgement) -> None:
        figure = judgement.overall.get(self.metric.name)
        if figure is None:
            return
        if self._best.round < 0 or self.metric.better(figure, self._best.metrics[self.metric.name]):
            model = self.method.model(state)
            self._best = Best(committed, judgement.overall, model.vector(), model.on)

    def _commit(self, record: RoundRecord, state: Any) -> None:
        on = self.method.model(state).on
        record = replace(record, sparsity=1 - on.count / max(on.size, 1), committed_at=time.time())
        self._records.append(record)
        self.on_round(record)

    def _round(
        self, requests: dict[str, Request], transport: Transport, judged: int, *, reporting: bool = False
    ) -> tuple[RoundRecord, list[Update]]:
        """Ask until enough sites contribute; everything is validated before anything is summed."""
        began = time.monotonic()
        first = len(self.desk.ledger.lines)
        for attempt in range(1, self.rules.retries + 2):
            tally = self._collect(requests, transport)
            contributed = [u for u in tally.answered if u.content != "nothing" and u.examples > 0]
            counted = tally.answered if reporting else contributed
            if counted and len(counted) >= min(self.rules.min_sites, len(requests)):
                return self._record(tally, requests, counted, judged, attempt, began, first), contributed
        raise RoundFailed(
            f"round {tally.question.round} ({tally.question.kind}): {len(counted)} of {len(requests)} sites contributed "
            f"in the last of {self.rules.retries + 1} attempts, {self.rules.min_sites} are needed; rejected: "
            f"{tally.rejected or 'none'}, silent: {tally.silent or 'none'}. The last committed model is intact."
        )

    def _record(
        self,
        tally: _Tally,
        requests: dict[str, Request],
        counted: list[Update],
        judged: int,
        attempts: int,
        began: float,
        first: int,
    ) -> RoundRecord:
        """The record of a round; ``first`` is its first line in the ledger, earlier attempts included."""
        lines = self.desk.ledger.lines[first:]
        return RoundRecord(
            kind=tally.question.kind,
            round=tally.question.round,
            sequence=tally.question.sequence,
            sites_asked=sorted(requests),
            sites_in=[u.site for u in counted],
            rejected=tally.rejected,
            abstained=[u.site for u in tally.answered if u.site not in {c.site for c in counted}],
            timed_out=tally.silent,
            attempts=attempts,
            judged_round=judged,
            judgement=Judgement.of(tally.answered),
            bytes_down=sum(line.payload_bytes for line in lines if line.direction == "down"),
            bytes_up=sum(line.payload_bytes for line in lines if line.direction == "up"),
            dense_bytes=sum(line.dense_bytes for line in lines),
            sparsity=0.0,
            seconds=time.monotonic() - began,
            committed_at=0.0,
        )

    def _collect(self, requests: dict[str, Request], transport: Transport) -> _Tally:
        """One question; sites that lost what they held are sent everything, once, in the same round."""
        question = self.desk.ask(requests)
        replies = dict(transport(question, self.desk))
        lost = {site: requests[site] for site, reply in replies.items() if isinstance(reply, NotHeld)}
        for site in lost:
            self.desk.forget(site)
        if lost:
            question = self.desk.ask(lost)
            replies |= transport(question, self.desk)
        rejected = {site: _reason(reply) for site, reply in replies.items() if not isinstance(reply, Update)}
        silent = sorted(set(requests) - set(replies))
        for site in [*rejected, *silent]:
            self.desk.forget(site)
        answered = [reply for _, reply in sorted(replies.items()) if isinstance(reply, Update)]
        return _Tally(question, answered, rejected, silent)


@dataclass(frozen=True)
class _Tally:
    question: Question
    answered: list[Update]
    rejected: dict[str, str]
    silent: list[str]


def _reason(reply: Reply) -> str:
    return reply if isinstance(reply, str) else str(getattr(reply, "code", type(reply).__name__))
