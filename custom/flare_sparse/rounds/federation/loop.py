"""The loop over the rounds of a run: ask, validate, aggregate, commit, evaluate."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ...core.checkpoint.packing import check_state
from ...core.checkpoint.store import DAMAGED, STEPPED_BACK, Store
from ...core.errors import RoundFailed
from ...core.exchange import EVALUATE, Patch
from ...methods.method import Method
from ...tasks.task import Metric
from ..endpoints.events import ENDED_EARLY, SERVER, TENSORS_CUT_OFF, UPDATE_DISCARDED, EventLog
from ..endpoints.server import ServerEndpoint, ServerSnapshot
from .progress import ModelComparison, Progress, describe_cut_tensors
from .records import BestModel, Evaluation, Outcome, RoundRecord
from .roster import Connections, Roster
from .rounds import DIVERGENCE_CODES, PERSONAL_DIVERGENCE_CODES, QuorumMissed, Round, RoundRunner
from .rules import RoundRules, SiteHistory

_LOG = logging.getLogger(__name__)


class Federation:
    """Runs one method over the connected sites. Each run needs a new instance.

    Args:
        method: the method; only its server-side functions are called.
        endpoint: the server's end of the wire.
        metric: decides, on validation examples, which model is best.
        connections: how the server reaches the sites.
        rules: quorum, retries and limits of a round.
        on_round: called with each record after its round is committed.
        store: receives a checkpoint with every commit; None: a crash loses the run.
    """

    def __init__(
        self,
        method: Method[Any, Any],
        endpoint: ServerEndpoint,
        metric: Metric,
        connections: Connections,
        *,
        rules: RoundRules | None = None,
        on_round: Callable[[RoundRecord], None] = lambda record: None,
        store: Store | None = None,
    ):
        self.method, self.endpoint = method, endpoint
        self.rules, self.on_round, self.store = rules or RoundRules(), on_round, store
        patience = self.rules.early_stopping.patience if self.rules.early_stopping else None
        self._models = ModelComparison(
            metric, self.rules.max_share, patience, is_sampled=method.config.participation < 1
        )
        self._roster = Roster(method, connections, self.rules)
        self._events = EventLog()
        self._stepped_back: set[int] = set()
        self._rounds = RoundRunner(endpoint, self.rules, self._roster, self._events)

    def run(
        self, weights: Tensor, *, resume: bool = False, notes: Mapping[str, Sequence[str]] = MappingProxyType({})
    ) -> Outcome:
        """Run all rounds, from the initial model or from the newest checkpoint.

        Args:
            weights: ``(P,)`` the initial model.
            resume: continue from the newest checkpoint if there is one; otherwise all checkpoints are deleted.
            notes: what the record says of the sites' data, by site.

        Raises:
            RoundFailed: too few sites can take part, or a round stayed below the quorum in every attempt; the last
                commit is intact.
            CheckpointError: a checkpoint could not be written, or belongs to another run.
        """
        roster = self._roster
        roster.admit(SiteHistory())
        start = progress = Progress(roster.method.init(weights, roster.sites))
        check_state(start.state, f"method {self.method.name}")
        if self.store is not None:
            if resume:
                progress = self._load_progress(self.store, progress)
            else:
                self.store.delete()
            # The first admission used an empty history; that of the checkpoint may quarantine sites.
            roster.sites = progress.history.select_available(roster.sites, self.rules)
        self._events.add_notes(notes)
        while True:
            self.endpoint.note_builders(weights, roster.capabilities)
            assignments = roster.assign(progress.state, progress.history)
            if self._models.is_stopped(progress):
                assignments = None
            try:
                if assignments is None:
                    return self._finish(progress)
                result = self._rounds.run(assignments, progress.history, roster.method, progress.state)
            except QuorumMissed as failure:
                progress = self._step_back(failure, progress, start)
            else:
                progress = self._commit(result, progress, roster.method)
                # Its updates would stay in memory beside those of the next round.
                del result
            roster.admit(progress.history)

    def _step_back(self, failure: QuorumMissed, progress: Progress[Any], start: Progress[Any]) -> Progress[Any]:
        """Return the progress before the last commit, if most sites diverge from the model of that commit.

        Raises:
            QuorumMissed: the round failed for another reason, the sites diverged in their own training after the last
                round, or the run already stepped back from this round.
        """
        if personal := ", ".join(failure.list_majority(PERSONAL_DIVERGENCE_CODES)):
            # The last model is sound: what diverged is one more training, with settings of its own.
            raise QuorumMissed(
                f"{failure} Most sites ({personal}) diverged in their own training after the last round: lower its "
                "learning rate or its pull (method.finetune.lr, method.finetune.proximal or method.adapt_lr).",
                failure.result,
            ) from failure
        diverged = ", ".join(failure.list_majority(DIVERGENCE_CODES))
        if not diverged or self.store is None or not progress.records:
            raise failure
        last = progress.records[-1]
        contributed = ", ".join(last.sites_contributed)
        # Step back once per round: a site that sends a harmful update again would let the run repeat the round forever.
        if last.round in self._stepped_back:
            raise QuorumMissed(
                f"round {last.round} was committed twice, and both times most sites ({diverged}) diverged from its "
                f"model. One of the updates in it, of {contributed}, is harmful: run again without that site, or set "
                "federation.clip_norm. A run that is resumed steps back from this commit by itself.",
                failure.result,
            ) from failure
        self._stepped_back.add(last.round)
        self._events.add_steps_back([self.store.step_back()])
        for site in last.sites_contributed:
            detail = f"its update of round {last.round} is discarded with that commit, from which sites diverged: "
            self._events.add(site, UPDATE_DISCARDED, detail + diverged)
        _LOG.warning(
            "most sites (%s) diverged from the model of round %d: the run steps back by one commit and discards the "
            "updates of %s",
            diverged,
            last.round,
            contributed,
        )
        checkpoint = self._load_checkpoint(self.store, start)
        self.endpoint.step_back(ServerSnapshot() if checkpoint is None else checkpoint.endpoint)
        return start if checkpoint is None else replace(checkpoint, endpoint=ServerSnapshot(), messages=())

    def _finish(self, progress: Progress[Any]) -> Outcome:
        """Evaluate the last model and return the outcome."""
        method = self._roster.method
        # Asked before the final evaluation, which may find that the last model is the best one.
        is_early = self._models.is_stopped(progress) and progress.committed < method.config.rounds
        if is_early and (shortfall := method.describe(progress.state)):
            self._events.add(SERVER, ENDED_EARLY, shortfall)
        progress = replace(progress, state=method.finalize(progress.state))
        # The request after the last round, also where early stopping leaves rounds out: a site answers it in that round
        # alone.
        last = replace(progress.state, round=method.config.rounds + 1)
        assignments = method.ask_final(last, self._roster.sites)
        result = self._rounds.run(assignments, progress.history)
        evaluation = self._evaluate(result)
        model = method.model(progress.state)
        # A request of another kind evaluates the sites' personal models, which are not candidates for the best model.
        if result.last.attempt.kind == EVALUATE:
            model = self.endpoint.round_model(model)
            progress = replace(progress, best=self._select_best(progress, evaluation, method, is_last=True))
        record = self._build_record(result, evaluation, progress, progress.state, method)
        self.on_round(record)
        return Outcome(
            progress.state,
            model.to_vector(),
            model.mask,
            evaluation,
            progress.best,
            [*progress.records, record],
            sorted({*self._roster.seen, *self.rules.examples}),
            progress.committed if is_early else None,
            dict(sorted(result.history.registered.items())),
        )

    def _commit(self, result: Round, progress: Progress[Any], method: Method[Any, Any]) -> Progress[Any]:
        """Write the checkpoint of a round and return the progress after it."""
        assert result.learned is not None, "a training round computes a next state"
        evaluation = self._evaluate(result)
        best = self._select_best(progress, evaluation, method)
        self.endpoint.commit([contribution.site for contribution in result.last.accepted])
        state = result.learned.state
        masks = (method.model(each).mask for each in (progress.state, state))
        if detail := describe_cut_tensors(self.endpoint.layout, *masks):
            self._events.add(SERVER, TENSORS_CUT_OFF, detail)
        record = self._build_record(result, evaluation, progress, state, method)
        progress = Progress(state, record.round, best, result.history, (*progress.records, record))
        # The checkpoint is the commit: a round is reported only after it, so that no reported round can be lost.
        if self.store is not None:
            endpoint, messages = self.endpoint.snapshot(), tuple(self.endpoint.ledger.lines)
            self.store.save(record.sequence, replace(progress, endpoint=endpoint, messages=messages))
        self.on_round(record)
        return progress

    def _evaluate(self, result: Round) -> Evaluation:
        return Evaluation.from_contributions(result.last.accepted, self.rules.max_share)

    def _select_best(
        self, progress: Progress[Any], evaluation: Evaluation, method: Method[Any, Any], *, is_last: bool = False
    ) -> BestModel:
        """Return the better of the best model so far and the last committed model."""
        # Each round also evaluates the model that it started from: evaluation needs no extra request, and the best
        # model is known one round later.
        if not self._models.is_better(evaluation, progress, is_last=is_last):
            return progress.best
        model = self.endpoint.round_model(method.model(progress.state))
        return BestModel(progress.committed, evaluation, Patch(model.values, model.mask))

    def _build_record(
        self, result: Round, evaluation: Evaluation, previous: Progress[Any], state: Any, method: Method[Any, Any]
    ) -> RoundRecord:
        """Return the record of a round.

        Raises:
            RoundFailed: a site asked is in none of the fields, or in two.
        """
        mask = method.model(state).mask
        record = result.record(
            evaluated_round=previous.committed,
            evaluation=evaluation,
            sparsity=1 - mask.count / max(mask.size, 1),
            committed_at=time.time(),
            events=self._events.take(result.last.attempt.round),
            figures=dict(method.measure(state)) if result.learned else {},
        )
        # A site that is counted twice or not at all is a defect of this package, and a record must not hide it.
        if not record.is_balanced:
            raise RoundFailed(f"round {record.round}: not every site asked has exactly one outcome: {record}")
        return record

    def _load_progress(self, store: Store, start: Progress[Any]) -> Progress[Any]:
        """Return the progress of the newest checkpoint, or ``start`` without one; report its rounds again."""
        checkpoint = self._load_checkpoint(store, start)
        if checkpoint is not None:
            self._events.restore(event for record in checkpoint.records for event in record.events)
        self._events.add_steps_back(store.list_numbers(STEPPED_BACK))
        for detail in self._events.add_damaged_checkpoints(store.list_numbers(DAMAGED), is_empty=checkpoint is None):
            _LOG.warning("%s: %s", SERVER, detail)
        if checkpoint is None:
            return start
        # The endpoint first: its sequence numbers continue, so that no late reply of the killed process is taken.
        self.endpoint.restore(checkpoint.endpoint)
        self.endpoint.ledger.lines.extend(checkpoint.messages)
        # Each process writes records and ledger from round 0 on; without the earlier rounds they would be incomplete.
        for record in checkpoint.records:
            self.on_round(record)
        return replace(checkpoint, endpoint=ServerSnapshot(), messages=())

    def _load_checkpoint(self, store: Store, start: Progress[Any]) -> Progress[Any] | None:
        found = store.load(Progress[self.method.get_state_class(start.state)])  # type: ignore[misc]
        return found[1] if found else None
