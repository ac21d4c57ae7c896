"""A site's end of the wire: decodes requests, lets the method answer them and encodes the updates."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...core.checkpoint.store import DAMAGED, Store
from ...core.errors import (
    FlareSparseError,
    MissingBase,
    OutOfMemory,
    RejectedMessage,
    TaskFailed,
    abbreviate,
    describe_exception,
    is_out_of_memory,
)
from ...core.exchange import EVALUATE, Patch, Request, RequestId, SiteEvent, Update
from ...core.mask import Mask
from ...core.seeds import make_generator
from ...methods.method import Method, get_site_limits, is_evaluated
from ...tasks.task import EPSILON
from ...training import Site
from ...wire.capabilities import local_capabilities
from ...wire.codec import Decoded, Encoded, decode, encode, read_names
from ...wire.envelope import Header
from ...wire.formats import FORMATS, ValueType
from ...wire.plan import NO_NAME, Plan, is_name
from ...wire.stage import SiteStage
from ..link import Answer, SiteLink, Vector, name_new_start, name_vector
from .events import CHECKPOINT_DAMAGED, MEMORY_DROPPED, MODEL_UNCHANGED, describe_event
from .plans import InitialModel, choose_values, correct_variances, plan_request, plan_update
from .request_log import ChangeLimit, RequestLog, check_kind, check_trainable, is_standstill

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteMemory:
    """What a site carries from one update to the next.

    Attributes:
        residual: rounding residual that is added to the next update (error feedback); None: zero.
        method: tensors that the method keeps at the site.
    """

    residual: Tensor | None = None
    method: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteSnapshot:
    """A site's checkpoint, written before each update is sent.

    Attributes:
        name: name of the answer.
        after: name of the last answer before it that counted; None: none.
        held: name of the vector that the site holds.
        mask: live entries of that vector.
        values: ``(mask.count,)`` their values; all others are zero.
        memory: memory after the answer.
    """

    name: str
    after: str | None
    held: str
    mask: Mask
    values: Tensor
    memory: SiteMemory

    @property
    def vector(self) -> Vector:
        """The vector that the site held."""
        return Vector(self.held, self.mask, self.mask.put(self.values, torch.zeros(self.mask.size)))


@dataclass(frozen=True)
class _Received:
    """A request that this site has accepted.

    Attributes:
        header: header of its message.
        request: the request.
        answer: name of the answer.
        counted: name of the last answer that counts; None: none.
        memory: memory from which the answer starts.
    """

    header: Header
    request: Request
    answer: str
    counted: str | None
    memory: SiteMemory = field(default_factory=SiteMemory)


class SiteEndpoint:
    """Decodes requests, answers them and encodes the updates, without FLARE.

    Between messages it remembers the vector that it holds and a :class:`~flare_sparse.rounds.link.SiteLink`.

    Args:
        site: trains and evaluates.
        method: computes the updates.
        run: id of the run, 16 hex digits, computed from the site's own copy of the job.
        values: number format on the wire.
        store: receives a checkpoint before each update is sent. None: after a crash the site needs the full model, and
            the tensors that the method keeps at the site are lost.
        stage: what the values of updates pass on their way; None: each update carries its values.
        requests: record of the answered requests, and limits on them; None: requests are checked but not counted.
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
        stage: SiteStage | None = None,
        requests: RequestLog | None = None,
        initial: InitialModel | None = None,
    ):
        self.site, self.method, self.run, self.values, self.store = site, method, run, values, store
        self.stage = stage or SiteStage()
        self.requests, self.initial = requests, initial
        factor = requests.max_model_change if requests else None
        self._changes = None if factor is None else ChangeLimit(factor, site.layout)
        self.request: Request | None = None
        self.events: tuple[SiteEvent, ...] = ()
        self._link: SiteLink[SiteMemory] = SiteLink()
        self._received: _Received | None = None
        self._is_started = False
        self._trainable: Mask | None = None

    def receive(self, data: Any, counted: str | None = None) -> Request:
        """Decode a request and write its model into ``site.weights``.

        Args:
            data: the message.
            counted: name of this site's last answer that counts, see
                :class:`~flare_sparse.rounds.endpoints.server.Attempt`; None: none.

        Raises:
            MissingBase: this site does not hold the vector that the message builds on; the server must send the full
                model.
            RejectedMessage: the message is malformed or outdated, or belongs to another run or model.
            RequestRefused: this site's copy of the job has no such request, or provides for no more of them.
            CheckpointError: the site's checkpoints belong to another job.
        """
        header = read_names(data, "server")
        # The name travels beside the message, without a checksum: a wrong one would cost the site its residual.
        if counted is not None and not is_name(counted):
            raise RejectedMessage("E_KIND", "counted", "16 hex digits", abbreviate(counted), "server")
        last = self._received.header.sequence if self._received else 0
        if header.sequence <= last:
            raise RejectedMessage("E_REPLAY", "sequence", f"above {last}", header.sequence, "server")
        if not self._is_started:
            self._restart(header.sequence)
        held = self._link.held
        previous = self._trainable or (held.mask if held else None)
        request = self._find_retried(header) or self._decode_request(data, header)
        request_id = RequestId(request.kind, request.round)
        held = self._link.held
        assert held is not None, "the request has led to a vector"
        memory, is_lost = self._link.recall(counted, SiteMemory())
        answer = name_new_start(header.request) if is_lost else header.request
        # Report it once for all attempts at a request.
        if is_lost and (self._received is None or self._received.answer != answer):
            self._report(SiteEvent(MEMORY_DROPPED, header.sequence))
        self._received = _Received(header, request, answer, counted, memory)
        self.site.receive(memory.method)
        # Refused after the state has changed: the site holds the model that its weights contain.
        check_trainable(self.method, request_id, request.trainable, held.mask)
        # A mask to which removed entries return is that of an earlier round, or one that isolates weights.
        trains = request.kind not in self.method.idle_kinds
        can_regrow = not (trains and self.method.prunes_for_good)
        is_regrown = not (can_regrow or previous is None or request.trainable <= previous)
        if self._changes is not None:
            self._changes.admit(request_id, self.site.weights, held.mask)
        if self.requests is not None:
            self.requests.admit(request_id, self.compute_model_digest(), is_regrown=is_regrown)
        self.request = request
        if trains:
            self._trainable = request.trainable
        return request

    def _report(self, event: SiteEvent) -> None:
        self.events = (*self.events, event)
        _LOG.warning(describe_event(event))

    def compute_model_digest(self) -> str:
        """Return the digest of the model that this site holds; equal models have equal digests at all sites."""
        assert self.site.live_patch is not None, "a request was received"
        # Hash the live entries alone: all others are zero.
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
            action, remedy = (
                f"round {request.round} ({request.kind})",
                "Correct the task, then resume with --start last",
            )
            raise TaskFailed(self.site.name, action, error, remedy) from error
        # Report subgroups of the last model only: each further model would tell more of small groups.
        if request.round > self.method.config.rounds and update.metrics and self.site.evaluated is not None:
            subgroups = self.site.trainer.evaluate_subgroups(*self.site.evaluated)
            update = replace(update, metrics={**update.metrics, **subgroups})
        notices = list(self.site.trainer.notices)
        # Of values that it cannot read the server must not learn that they are zero.
        if not self.stage.hides_values and is_standstill(update, self.site.weights, self.site.layout):
            notices.append(MODEL_UNCHANGED)
        # Reported once, with the number of the first attempt, so that the server knows a repeated report.
        reported = {event.event for event in self.events}
        new = [SiteEvent(code, self._current.header.sequence) for code in notices if code not in reported]
        self.events = (*self.events, *new)
        if self._changes is not None:
            self._changes.measure(update, self.site.weights)
        accounting = self.site.trainer.mechanism
        if accounting is None:
            return update
        return replace(update, metrics={**update.metrics, EPSILON: accounting.compute_spent()})

    def _compute_update(self, request: Request) -> Update:
        self.site.trainer.reset_usage()
        is_evaluated = self._is_evaluated(request)
        # A site without training examples can only evaluate, and no other models than the other sites do.
        if request.kind == EVALUATE or not self.site.trainer.can_train:
            metrics = self.site.evaluate(self.site.weights) if is_evaluated else {}
            return Update(Patch.empty(self.site.layout.size), "metrics", self.site.num_examples, metrics)
        update = self.method.answer(request, self.site)
        if update.metrics or not is_evaluated:
            return update
        return replace(update, metrics=self.site.evaluate(self.site.weights))

    def _is_evaluated(self, request: Request) -> bool:
        """Return whether the sites evaluate the model of a request: not before round 1, which is the first to hold it.

        Requests before it ask for statistics and scores.
        """
        config, t = self.method.config, request.round
        if request.kind in self.method.score_kinds:
            return False
        return request.kind == EVALUATE or t > config.rounds or (t > 0 and is_evaluated(config, t - 1))

    def encode(self, request: Request, update: Update) -> Encoded:
        """Encode ``update`` and write the checkpoint; the rounding residual is added to the next update.

        Raises:
            RejectedMessage: a value is not finite, or cannot be summed; nothing may be sent.
            CheckpointError: the checkpoint could not be written; nothing may be sent.
        """
        residual = self._current.memory.residual
        request_id = RequestId(request.kind, request.round)
        self.stage.seal(update, request_id, self.site.weights, self.compute_model_digest)
        encoded = self.encode_message(request, update)
        # Error feedback applies to model values only: an update of scores or metrics leaves the residual unchanged.
        if update.content in ("weights", "delta") and not self.stage.hides_values:
            residual = encoded.residual
            # An entry that is switched off keeps no residual: it would arrive with it when it is regrown.
            if update.is_complete and residual is not None:
                residual = residual.where(update.patch.mask.bits.to(residual.device), 0.0)
        self._record_answer(SiteMemory(residual, dict(self.site.memory)))
        return encoded

    def encode_message(self, request: Request, update: Update) -> Encoded:
        """Return the message of ``update``, the same each time until the next request.

        Raises:
            RejectedMessage: as in :meth:`encode`.
        """
        empty = Patch.empty(self.site.layout.size)
        sent = replace(update, patch=empty, content="metrics") if self.stage.hides_values else update
        return encode(
            sent.patch,
            self.plan_update(request),
            content=sent.content,
            values=choose_values(sent.content, self.values, self.initial),
            residual=self._current.memory.residual,
            generator=make_generator(self.method.seed, "rounding", self.site.name, request.kind, request.round),
        )

    def plan_update(self, request: Request) -> Plan:
        """Return the plan of the update that answers ``request``."""
        current, held = self._current, self._link.held
        assert held is not None, "a request was received"
        target = replace(held, values=self.site.weights) if FORMATS[self.values].sends_differences else held
        return plan_update(
            self.site.layout, self.run, request, target, request=current.answer, sequence=current.header.sequence
        )

    @property
    def _current(self) -> _Received:
        assert self._received is not None, "a request was received"
        return self._received

    def build_hello(self, **limits: Any) -> dict[str, str | int | float]:
        """Return the hello: this site's capabilities, sent to the server before the first request.

        Args:
            limits: limits of the site's policy, fields of :class:`~flare_sparse.wire.capabilities.Capabilities`.
        """
        digest = self.initial.digest if self.initial else None
        return local_capabilities(**get_site_limits(self.site), initial_model=digest, **limits).to_message()

    def _find_retried(self, header: Header) -> Request | None:
        """Return the last request if a message is another attempt at it, whose model this site then holds already."""
        last, held = self._received, self._link.held
        # The message builds on the vector before this one, which no longer is there.
        is_same = last is not None and replace(header, sequence=0) == replace(last.header, sequence=0)
        return last.request if last is not None and is_same and held and held.name == header.target else None

    def _decode_request(self, data: Any, header: Header) -> Request:
        """Return the request of a message, and hold the vector to which it leads.

        Raises:
            MissingBase: as in :meth:`receive`.
            RejectedMessage: as in :meth:`receive`.
            RequestRefused: as in :meth:`receive`.
        """
        message = decode(data, plan_request(self.site.layout, self.run, self._find_base(header.base)), "server")
        assert message.trainable is not None, "decode() has checked it"
        check_kind(self.method, RequestId(message.header.kind, message.header.round))
        patch = correct_variances(message.patch, self.site.layout)
        self._apply_patch(patch, message)
        return Request(message.header.kind, message.header.round, patch, message.trainable)

    def _find_base(self, name: str) -> Vector | None:
        """Return a vector that this site holds, which its weights then contain; None: it does not hold it."""
        held = self._link.held
        if name != NO_NAME and (held is None or name != held.name):
            snapshots = self._iterate_checkpoints()
            stored = next((snapshot for snapshot in snapshots if snapshot.held == name), None)
            if stored is not None:
                self._hold(stored.vector)
            elif self.initial is not None and name == self.initial.vector.name:
                self._hold(replace(self.initial.vector, values=self.initial.weights.clone()))
        held = self._link.held
        return None if held is None else replace(held, values=self.site.weights)

    def _hold(self, vector: Vector) -> None:
        assert vector.values is not None, "a stored vector has its values"
        self.site.weights, self.site.live_patch = vector.values, Patch.from_vector(vector.values, vector.mask)
        self._link = replace(self._link, held=replace(vector, values=None))

    def _apply_patch(self, patch: Patch, message: Decoded) -> None:
        """Write a patch into the weights of the site, and set its ``live_patch``.

        Raises:
            MissingBase: this leads to another vector than the server's.
            RejectedMessage: a patch over the previous model has other entries.
        """
        held, is_whole = self._link.held, patch.base == "zeros"
        # Entries outside the mask are zero by definition, and neither end stores or sends them; those of an unchanged
        # mask are zero already.
        if is_whole and (held is None or patch.mask != held.mask):
            self.site.weights.zero_()
        if not is_whole and held is not None and not patch.mask <= held.mask:
            raise RejectedMessage("E_MASK", "selection", "entries of the previous model", "others", "server")
        mask = patch.mask if is_whole or held is None else held.mask
        patch.write_into(self.site.weights)
        # The values of a whole model are at hand: the digest, the training and the checkpoint need not gather them.
        self.site.live_patch = Patch(patch.values, mask) if is_whole else Patch.from_vector(self.site.weights, mask)
        if not is_whole and not patch.mask.count and held is not None:
            name = held.name
        else:
            name = name_vector(self.site.live_patch)
        self._link = replace(self._link, held=Vector(name, mask) if name == message.header.target else None)
        if name != message.header.target:
            raise MissingBase("E_NOT_HELD", "target", message.header.target, name, "server")

    def _iterate_checkpoints(self) -> Iterator[SiteSnapshot]:
        """Yield the intact checkpoints, the newest first."""
        found = self.store.load(SiteSnapshot) if self.store is not None else None
        while found is not None and self.store is not None:
            yield found[1]
            found = self.store.load(SiteSnapshot, below=found[0])

    def _restart(self, sequence: int) -> None:
        """Restart from the checkpoints before an attempt, the first of this process.

        Args:
            sequence: number of the attempt.
        """
        self._is_started = True
        if self.store is None:
            return
        # Those with this number or a higher one belong to answers that the server has lost: it gives numbers again.
        self.store.delete(sequence)
        answers, found = {}, self.store.load(SiteSnapshot)
        if found is not None:
            self._hold(found[1].vector)
        while found is not None:
            number, snapshot = found
            answers[snapshot.name] = Answer(snapshot.after, snapshot.memory, number)
            found = self.store.load(SiteSnapshot, below=number)
        self._link = replace(self._link, answers=answers)
        for number in self.store.list_numbers(DAMAGED):
            self._report(SiteEvent(CHECKPOINT_DAMAGED, number))

    def _record_answer(self, memory: SiteMemory) -> None:
        """Write the checkpoint of an answer, then change the state.

        Raises:
            CheckpointError: the checkpoint could not be written; the state is unchanged.
        """
        current, held, live = self._current, self._link.held, self.site.live_patch
        assert held is not None, "an update answers a request that was received"
        assert live is not None
        number = current.header.sequence
        link = self._link.add_answer(current.answer, current.counted, memory, number)
        if self.store is not None:
            after = link.answers[current.answer].after
            snapshot = SiteSnapshot(current.answer, after, held.name, held.mask, live.values, memory)
            self.store.save(number, snapshot, also_keep=[answer.number for answer in link.answers.values()])
        self._link = link
