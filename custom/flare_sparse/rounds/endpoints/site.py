"""A site's end of the wire: decodes requests, lets the method answer them and encodes the updates."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ...compute.structure.scaling import drop_rests
from ...core.checkpoint.store import Store
from ...core.errors import (
    FlareSparseError,
    MissingBase,
    OutOfMemory,
    RejectedMessage,
    TaskFailed,
    abbreviate,
    describe_exception,
)
from ...core.exchange import EVALUATE, STATISTICS, Patch, Request, SiteEvent, Update
from ...core.mask import Mask
from ...core.memory import is_out_of_memory
from ...core.seeds import make_generator
from ...methods.method import Method, get_site_limits, is_evaluated
from ...privacy.encryption import SiteCipher
from ...tasks.task import EPSILON
from ...training import Site
from ...wire.capabilities import local_capabilities
from ...wire.codec import decode, encode, read_sequences
from ...wire.formats import ValueType, is_quantized
from ...wire.messages import Decoded, Encoded
from ...wire.plan import Plan
from .bases import InitialModel, SiteBase, choose_values, correct_variances, plan_request, plan_update
from .events import CHECKPOINT_DAMAGED, MEMORY_DROPPED, MODEL_UNCHANGED, describe_event
from .model_change import ChangeLimit, is_standstill
from .request_checks import check_kind, check_trainable, is_training
from .request_log import RequestLog
from .site_state import RequestId, SiteMemory, SiteSnapshot, SiteState
from .site_sums import SiteSums

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestLimits:
    """What a site refuses beside requests that its copy of the job does not have.

    Attributes:
        requests: record of the answered requests; None: requests are checked but not counted.
        changes: refuses models that are too far from the last one; None: they may be anywhere.
    """

    requests: RequestLog | None = None
    changes: ChangeLimit | None = None


NO_LIMITS = RequestLimits()


class SiteEndpoint:
    """Decodes requests, answers them and encodes the updates, without FLARE.

    :class:`~flare_sparse.rounds.endpoints.site_state.SiteState` is what the site remembers between messages. It
    defines how a message, a retry and a restart change that state.

    Args:
        site: trains and evaluates.
        method: computes the updates.
        run: id of the run, 16 hex digits, computed from the site's own copy of the job.
        values: number format on the wire.
        store: receives a checkpoint before each update is sent. None: after a crash the site needs the full model, and
            the tensors that the method keeps at the site are lost.
        protection: encrypts weights and decrypts models, or withholds the values of updates and pads them for a sum;
            None: all values travel in the clear.
        limits: what this site refuses beside requests that its copy of the job does not have.
        initial: the model of the job's seed, which the first request then need not carry; None: it does.

    Attributes:
        request: the last accepted request; None before the first.
        events: what this site reports beside each of its updates. The server ignores repeated reports, so a report
            is not lost with an update.
    """

    def __init__(
        self,
        site: Site,
        method: Method[Any, Any],
        run: str,
        values: ValueType,
        store: Store | None = None,
        protection: SiteCipher | SiteSums | None = None,
        limits: RequestLimits = NO_LIMITS,
        initial: InitialModel | None = None,
    ):
        self.site, self.method, self.run, self.values, self.store = site, method, run, values, store
        self.cipher = protection if isinstance(protection, SiteCipher) else None
        self.sums = protection if isinstance(protection, SiteSums) else None
        self.requests, self.changes, self.initial = limits.requests, limits.changes, initial
        self.request: Request | None = None
        self.events: tuple[SiteEvent, ...] = ()
        self._state = SiteState()
        self._trainable: Mask | None = None

    def receive(self, data: Any, acknowledged: int | None = None) -> Request:
        """Decode a request and write its model into ``site.weights``.

        Args:
            data: the message.
            acknowledged: number of the attempt with this site's last update that the server has, see
                :class:`~flare_sparse.rounds.endpoints.server.Attempt`; None: unknown.

        Raises:
            MissingBase: this site does not hold the vector that the patch applies to; the server must send the full
                model.
            RejectedMessage: the message is malformed or outdated, or belongs to another run or model.
            RequestRefused: this site's copy of the job has no such request, or provides for no more of them.
            CheckpointError: the site's checkpoints belong to another job.
        """
        # Checkpoints are loaded here and not in the constructor: the sequence number of the first message after the
        # start decides which of them are still valid.
        sequence, base_sequence = read_sequences(data, "server")
        # The number travels beside the message, without a checksum: a wrong one would cost the site its residual.
        if acknowledged is not None and (type(acknowledged) is not int or not 0 <= acknowledged < sequence):
            raise RejectedMessage("E_KIND", "acknowledged", f"below {sequence}", abbreviate(acknowledged), "server")
        if self._state.sequence == 0:
            self._restart(sequence, base_sequence, acknowledged)
        message = self._decode_request(data)
        if message.sequence <= self._state.sequence:
            raise RejectedMessage("E_REPLAY", "sequence", f"above {self._state.sequence}", message.sequence, "server")
        if message.trainable is None:
            raise RejectedMessage("E_KIND", "trainable", "a request", "an update", "server")
        request_id = RequestId(message.kind, message.round)
        check_kind(self.method, request_id)
        patch = correct_variances(self.decrypt(message.patch), self.site.layout)
        previous = self._trainable or (self._state.base.mask if self._state.base else message.trainable)
        base = self._apply_patch(patch, message.sequence)
        if acknowledged is not None and self._is_discarded(request_id, acknowledged):
            self._take_back_update()
        self._state = self._state.receive(request_id, base)
        self.site.receive(self._state.memory.method)
        # Refused after the state has changed: the site holds the model that its weights contain.
        check_trainable(self.method, request_id, message.trainable, base.mask)
        # A mask to which removed entries return is that of an earlier round, or one that isolates weights.
        can_regrow = not (is_training(message.kind) and self.method.prunes_for_good)
        self._apply_limits(request_id, base.mask, is_regrown=not (can_regrow or message.trainable <= previous))
        self.request = Request(message.kind, message.round, patch, message.trainable)
        if is_training(message.kind):
            self._trainable = message.trainable
        return self.request

    def _apply_limits(self, request: RequestId, live: Mask, *, is_regrown: bool) -> None:
        """Raises:
        RequestRefused: the model is too far from the last one, or the job provides for no more such requests.
        """
        if self.changes is not None:
            self.changes.admit(request, self.site.weights, live)
        if self.requests is not None:
            self.requests.admit(request, self.compute_model_digest(), is_regrown=is_regrown)

    def _take_back_update(self) -> None:
        """Continue from the memory before the last update, whose checkpoint is deleted."""
        if self.store is not None:
            self.store.delete(self._state.checkpoint or 0)
        self._state = self._state.take_back()

    def _is_discarded(self, request: RequestId, acknowledged: int) -> bool:
        """Return whether the server goes on to another request without the last update of this site."""
        state = self._state
        return request not in (state.received, state.answered) and acknowledged < (state.checkpoint or 0)

    def compute_model_digest(self) -> str:
        """Return the digest of the model that this site holds; equal models have equal digests at all sites."""
        assert self.site.live_patch is not None, "a request was received"
        # Of the live entries alone: all others are zero.
        return self.site.live_patch.digest

    def answer(self, request: Request) -> Update:
        """Return the method's update, with metrics of the received model unless the method reports its own.

        Models between those of ``method.evaluate_every`` are not evaluated.

        Raises:
            TaskFailed: the user task raised an exception of its own; the text names the user's line.
            OutOfMemory: the site's process got no more memory, whatever a library made of that.
        """
        try:
            update = self._compute_update(request)
        except FlareSparseError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                text = f"site {self.site.name}: memory ran out in round {request.round}: {describe_exception(error)}"
                raise OutOfMemory(text) from error
            action, remedy = f"round {request.round} ({request.kind})", "Correct the task, then resume with --resume"
            raise TaskFailed(self.site.name, action, error, remedy) from error
        # Once, of the last model: each further model would tell more of small groups.
        if request.round > self.method.config.rounds and update.metrics and self.site.evaluated is not None:
            subgroups = self.site.trainer.evaluate_subgroups(*self.site.evaluated)
            update = replace(update, metrics={**update.metrics, **subgroups})
        notices = list(self.site.trainer.notices)
        # Of a sum the server must not learn that one of its terms is zero.
        if self.sums is None and is_standstill(update, self.site.weights, self.site.layout):
            notices.append(MODEL_UNCHANGED)
        # Reported once, with the number of the first attempt, so that the server knows a repeated report.
        reported = {event.event for event in self.events}
        new = [SiteEvent(code, self._state.sequence) for code in notices if code not in reported]
        self.events = (*self.events, *new)
        if self.changes is not None:
            self.changes.measure(update, self.site.weights)
        accounting = self.site.trainer.mechanism or self.site.trainer.metric_release
        if accounting is None:
            return update
        return replace(update, metrics={**update.metrics, EPSILON: accounting.compute_spent()})

    def _compute_update(self, request: Request) -> Update:
        self.site.trainer.reset_usage()
        # A site without training examples can only evaluate.
        if request.kind == EVALUATE or not self.site.trainer.can_train:
            no_values = Patch.empty(self.site.layout.size)
            return Update(no_values, "metrics", self.site.num_examples, self.site.evaluate(self.site.weights))
        if request.kind == STATISTICS:
            statistics = self.site.trainer.compute_statistics(self.site.weights)
            if choose_values(STATISTICS, self.values, self.initial) != "float32":
                statistics = drop_rests(statistics, self.site.layout)
            return Update(Patch.from_vector(statistics, request.trainable), STATISTICS, self.site.num_examples)
        update = self.method.answer(request, self.site)
        if update.metrics or update.content == "scores" or not is_evaluated(self.method.config, request.round - 1):
            return update
        return replace(update, metrics=self.site.evaluate(self.site.weights))

    def encode(self, request: Request, update: Update) -> Encoded:
        """Encode ``update`` and write the checkpoint; the rounding residual is added to the next update.

        Raises:
            RejectedMessage: a value is not finite, or cannot be encrypted or summed; nothing may be sent.
            CheckpointError: the checkpoint could not be written; nothing may be sent.
        """
        residual = self._state.memory.residual
        if self.sums is not None:
            request_id = RequestId(request.kind, request.round)
            # Sums without pads have no keys that the digest could enter.
            digest = self.compute_model_digest() if self.sums.rules.is_padded else ""
            update = self.sums.withhold(update, request_id, self._state.sequence, self.site.weights, digest)
        encoded = self.encode_message(request, update)
        # Error feedback applies to model values only: an update of scores or metrics leaves the residual unchanged.
        if update.content in ("weights", "delta"):
            residual = encoded.residual
            # An entry that is switched off keeps no residual: it would arrive with it when it is regrown.
            if update.is_complete and residual is not None:
                residual = residual.where(update.patch.mask.bits, 0.0)
        self._record_answer(RequestId(request.kind, request.round), SiteMemory(residual, dict(self.site.memory)))
        return encoded

    def encode_message(self, request: Request, update: Update) -> Encoded:
        """Return the message of ``update``, the same each time until the next request.

        Raises:
            RejectedMessage: as in :meth:`encode`.
        """
        return encode(
            self._encrypt(update),
            self.plan_update(request),
            content=update.content,
            values=choose_values(update.content, self.values, self.initial),
            residual=self._state.memory.residual,
            generator=make_generator(self.method.seed, "rounding", self.site.name, request.kind, request.round),
        )

    def plan_update(self, request: Request) -> Plan:
        """Return the plan of the update that answers ``request``."""
        vector = self.site.weights if is_quantized(self.values) else None
        return plan_update(self.site.layout, self.run, request, self._state.sequence, vector=vector)

    def build_hello(self, **limits: Any) -> dict[str, str | int | float]:
        """Return the hello: this site's capabilities, sent to the server before the first request.

        Args:
            limits: limits of the site's policy, fields of :class:`~flare_sparse.wire.capabilities.Capabilities`.
        """
        digest = self.initial.digest if self.initial else None
        return local_capabilities(**get_site_limits(self.site), initial_model=digest, **limits).to_message()

    def decrypt(self, patch: Patch) -> Patch:
        """Return the patch with readable values.

        Raises:
            RejectedMessage: the values were not encrypted with this site's key.
        """
        if patch.encrypted is None or self.cipher is None:
            return patch
        return Patch(self.cipher.decrypt(patch.encrypted, patch.mask.count), patch.mask, patch.base)

    def _encrypt(self, update: Update) -> Patch:
        """Return the patch to send: weights and deltas encrypted if the job asks for it, scores and metrics never."""
        if self.cipher is None or update.content not in ("weights", "delta"):
            return update.patch
        return replace(update.patch, encrypted=self.cipher.encrypt(update.patch.values))

    def _decode_request(self, data: Any) -> Decoded:
        """Decode a message over the current base or, if it is a retry, over a base from before an earlier attempt.

        Raises:
            MissingBase: as in :meth:`receive`.
            RejectedMessage: as in :meth:`receive`.
        """
        try:
            return self._decode_over(self._state.base, data)
        except MissingBase:
            # The server encodes a retry over the last base that this site acknowledged. If the site's update was lost
            # in transit, the site is one base ahead. All attempts carry the same vector, so the older base is valid.
            for base in reversed(self._state.earlier_bases):
                with suppress(MissingBase):
                    message = self._decode_over(base, data)
                    if (message.kind, message.round) == self._state.received:
                        return self._keep_vector(message) if message.is_difference else message
            if self.initial is not None:
                with suppress(MissingBase):
                    return self._decode_over_initial(data, self.initial)
            raise

    def _decode_over_initial(self, data: Any, initial: InitialModel) -> Decoded:
        """Return a message over the initial model as one of the whole model, which the server could also send."""
        message = decode(data, plan_request(self.site.layout, self.run, initial.base), "server")
        return replace(message, patch=initial.complete(message.patch))

    def _keep_vector(self, message: Decoded) -> Decoded:
        """Return a message whose differences this site has added already with the values that the site holds."""
        mask = message.patch.mask
        return replace(message, patch=Patch(mask.take(self.site.weights).clone(), mask, message.patch.base))

    def _decode_over(self, base: SiteBase | None, data: Any) -> Decoded:
        ciphertext_format = self.cipher.ciphertext_format if self.cipher else None
        if base is not None:
            base = replace(base, vector=self.site.weights)
        plan = plan_request(self.site.layout, self.run, base, ciphertext_format=ciphertext_format)
        return decode(data, plan, "server")

    def _apply_patch(self, patch: Patch, sequence: int) -> SiteBase:
        """Write a patch into the weights of the site, set its ``live_patch``, and return the new base."""
        base = self._state.base
        if patch.base == "previous" and base is not None:
            mask = base.mask
            # The entries outside the base's mask are zero at both ends, and neither stores or sends them.
            if not patch.mask <= mask:
                raise RejectedMessage("E_MASK", "selection", "entries of the previous model", "others", "server")
        else:
            # Entries outside the mask are zero by definition; those of an unchanged mask are zero already.
            if base is None or patch.mask != base.mask:
                self.site.weights.zero_()
            mask = patch.mask
        patch.write_into(self.site.weights)
        # The values of a whole model are at hand: the digest, the training and the checkpoint need not gather them.
        is_whole = patch.base == "zeros"
        self.site.live_patch = Patch(patch.values, mask) if is_whole else Patch.from_vector(self.site.weights, mask)
        return SiteBase(mask, sequence)

    def _restart(self, sequence: int, base_sequence: int, acknowledged: int | None) -> None:
        """Restart from the checkpoints before message ``sequence``, and record what is lost.

        Args:
            sequence: number of the first message of this process.
            base_sequence: number of the message that carried its base; 0: it applies to no earlier message.
            acknowledged: as in :meth:`receive`.
        """
        # Checkpoints with this number or a higher one belong to updates that the server discarded when it resumed.
        # Those after the message's base do, too: a server that goes back gives the numbers of attempts again.
        limit = base_sequence + 1 if base_sequence else sequence
        damaged = self._load_checkpoints(self.store, min(limit, sequence)) if self.store is not None else []
        events = [SiteEvent(CHECKPOINT_DAMAGED, number) for number in damaged]
        # A checkpoint is written before its update is sent, so a damaged one stands for an update that an unknowing
        # server may have.
        latest = max([0, *damaged]) if acknowledged is None else acknowledged
        # The residual before a lost update holds values that the update sent. Used again, they would be sent twice.
        if latest > self._state.sequence:
            self._state = self._state.forget_memory()
            events.append(SiteEvent(MEMORY_DROPPED, latest))
        self.events = tuple(events)
        for event in events:
            _LOG.warning(describe_event(event))

    def _load_checkpoints(self, store: Store, limit: int) -> list[int]:
        """Load the newest state below a number, delete later ones, and return the numbers of damaged checkpoints."""
        store.delete(limit)
        newest = store.load(SiteSnapshot)
        if newest is None:
            return store.list_damaged()
        _, snapshot = newest
        fallback = _load_previous_request(store, newest)
        reserve = _load_previous_request(store, fallback) if fallback else None
        self.site.weights, self.site.live_patch = snapshot.to_vector(), Patch(snapshot.values, snapshot.base.mask)
        damaged = store.list_damaged()
        self._state = SiteState.restart(
            snapshot, fallback[1] if fallback else None, damaged, reserve=reserve[0] if reserve else None
        )
        return damaged

    def _record_answer(self, request: RequestId, memory: SiteMemory) -> None:
        """Write the checkpoint of an update, then change the state.

        Raises:
            CheckpointError: the checkpoint could not be written; the state is unchanged.
        """
        state = self._state.answer(request, memory)
        if self.store is not None:
            assert state.base is not None, "an update answers a request that was received"
            assert self.site.live_patch is not None
            snapshot = SiteSnapshot(*request, self.site.live_patch.values, state.base, memory)
            self.store.save(state.sequence, snapshot, also_keep=(state.fallback, state.reserve))
        self._state = state


def _load_previous_request(store: Store, checkpoint: tuple[int, SiteSnapshot]) -> tuple[int, SiteSnapshot] | None:
    """Return the newest checkpoint before another one that is of another request; None without one."""
    # Each attempt at a request has its own checkpoint; a retry starts from the one before the first of them.
    request, previous = checkpoint[1].request, store.load(SiteSnapshot, below=checkpoint[0])
    while previous is not None and previous[1].request == request:
        previous = store.load(SiteSnapshot, below=previous[0])
    return previous
