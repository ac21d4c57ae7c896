"""A site's end of the wire: reads questions, has the method answer them, writes the answers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..checkpoint.store import Store
from ..encryption import SiteCipher
from ..errors import NotHeld, RejectedMessage
from ..exchange import VALIDATE, Patch, Request, Update
from ..mask import Mask
from ..methods import Method
from ..training import Site
from ..wire.codec import Decoded, Encoded, decode, encode, sequence_of
from ..wire.plan import Plan, ValueType


@dataclass(frozen=True)
class Carried:
    """What a site carries from one answer to the next: what the number format rounded off, what its method keeps."""

    residual: Tensor | None = None
    method: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteMemory:
    """What a site must remember to go on after a crash as if nothing had happened; kind and round are of the question
    that it had answered then.
    """

    kind: str
    round: int
    weights: Tensor
    known: Mask | None
    base: int | None
    carried: Carried


class SiteDesk:
    """Decodes what the server asks, answers, and encodes the answer. Knows nothing of FLARE.

    A question with the kind and the round of the one before is a further attempt: the answer to the first was given up,
    and with it what it did to ``site.memory`` and to the residual. The same question gets the same answer. It may lean
    on what the site held before any of these attempts: their vectors are one.

    Args:
        site: trains and judges.
        method: its site half answers.
        run: 16 hex digits that name the run; computed here, from the site's own copy of the job.
        values: number format on the wire.
        store: receives a checkpoint before every answer; None: after a crash the site is sent everything, and what a
            method keeps at the site is lost.
        cipher: weights leave encrypted, and the model may come so; None: all is in the clear.
    """

    def __init__(
        self,
        site: Site,
        method: Method[Any],
        run: str,
        values: ValueType,
        store: Store | None = None,
        cipher: SiteCipher | None = None,
    ):
        self.site, self.method, self.run, self.values, self.store = site, method, run, values, store
        self.cipher = cipher
        self.asked: Request | None = None
        self._known: Mask | None = None
        self._base: int | None = None
        self._sequence = 0
        self._taken: tuple[str, int] | None = None
        self._earlier: list[tuple[Mask | None, int | None]] = []
        self._answered: tuple[str, int] | None = None
        self._before = self._after = Carried()
        self._start = Carried()
        self._saved: int | None = None
        self._saved_before: int | None = None

    def receive(self, data: Any) -> Request:
        """The question in a message; afterwards ``site.weights`` is the vector that it speaks of.

        Raises:
            NotHeld: the message leans on something this site does not hold; answer "send everything".
            RejectedMessage: the message is malformed, old, or of another run or model.
            CheckpointError: what this site kept before a crash is of another job.
        """
        if self._sequence == 0 and self.store is not None:
            self._remember(self.store, sequence_of(data, "server"))
        message = self._read(data)
        if message.sequence <= self._sequence:
            raise RejectedMessage("E_REPLAY", "sequence", f"above {self._sequence}", message.sequence, "server")
        if message.trainable is None:
            raise RejectedMessage("E_KIND", "trainable", "a question", "an answer", "server")
        patch = self.opened(message.patch)
        question = (message.kind, message.round)
        self._earlier = [*(self._earlier if question == self._taken else ()), (self._known, self._base)]
        self._take(patch)
        self._taken, self._base, self._sequence = question, message.sequence, message.sequence
        self._start = self._before if question == self._answered else self._after
        self.site.memory = dict(self._start.method)
        self.asked = Request(message.kind, message.round, patch, message.trainable)
        return self.asked

    def _read(self, data: Any) -> Decoded:
        """The message, which leans on what is held now or, of a further attempt, on what was held before it.

        Raises:
            NotHeld, RejectedMessage: as :meth:`receive`.
        """
        sealing = self.cipher.sealing if self.cipher else None
        plan = Plan(self.site.layout, self.run, known=self._known, base=self._base, sealing=sealing)
        try:
            return decode(data, plan, "server")
        except NotHeld:
            for known, base in reversed(self._earlier):
                with suppress(NotHeld):
                    message = decode(data, replace(plan, known=known, base=base), "server")
                    if (message.kind, message.round) == self._taken:
                        return message
            raise

    def opened(self, patch: Patch) -> Patch:
        """A patch with values to read, decrypted if need be.

        Raises:
            RejectedMessage: it was not encrypted with this site's key.
        """
        if patch.sealed is None or self.cipher is None:
            return patch
        return Patch(self.cipher.open(patch.sealed, patch.on.count), patch.on, patch.over)

    def _remember(self, store: Store, asked: int) -> None:
        """What this site was after its last answer before the question ``asked``; what came later was given up."""
        store.drop(asked)
        if (found := store.load(SiteMemory)) is None:
            return
        self._sequence, memory = found
        self.site.weights, self._known, self._base = memory.weights, memory.known, memory.base
        self._answered, self._after, self._saved = (memory.kind, memory.round), memory.carried, self._sequence
        while found is not None and (found[1].kind, found[1].round) == self._answered:
            found = store.load(SiteMemory, below=found[0])
        self._taken = self._answered
        self._earlier = [(found[1].known, found[1].base) if found else (None, None)]
        self._saved_before, self._before = (found[0], found[1].carried) if found else (None, Carried())

    def _settle(self, request: Request, after: Carried) -> None:
        """The answer is ready: on the disk what it leaves behind, and from before its first attempt what was there.

        Raises:
            CheckpointError: it could not be written; then this answer never was.
        """
        again = (request.kind, request.round) == self._answered
        earlier = self._saved_before if again else self._saved
        if self.store is not None:
            memory = SiteMemory(request.kind, request.round, self.site.weights, self._known, self._base, after)
            self.store.save(self._sequence, memory, spared=earlier)
            self._saved, self._saved_before = self._sequence, earlier
        self._answered, self._before, self._after = (request.kind, request.round), self._start, after

    def _take(self, patch: Patch) -> None:
        if patch.over == "zeros":
            if patch.on != self._known:
                self.site.weights.zero_()
            self._known = patch.on
        patch.applied(self.site.weights)

    def answer(self, request: Request) -> Update:
        """The method's answer, with the site's judgement of the model it was sent unless it judged another."""
        self.site.reset_used()
        if request.kind == VALIDATE or not self.site.examples:  # who has nothing to learn from can only judge
            nothing = Patch.empty(self.site.layout.size)
            return Update(nothing, "nothing", self.site.examples, self.site.judge(self.site.weights))
        update = self.method.answer(request, self.site)
        if update.metrics or update.content == "scores":
            return update
        return replace(update, metrics=self.site.judge(self.site.weights))

    def hello(self, **limits: Any) -> dict[str, str | int | float]:
        """What this site says of itself before it is asked.

        Args:
            limits: of the site's policy, fields of :class:`~flare_sparse.capabilities.Capabilities`.
        """
        return self.method.able(self.site).model_copy(update=limits).said()

    def encode(self, request: Request, update: Update) -> Encoded:
        """The message that carries ``update`` back; what the number format rounds off goes with the next one.

        Raises:
            RejectedMessage: a value is not finite, or not one that can be encrypted; nothing is sent.
            CheckpointError: what this site must remember could not be written; then nothing may be sent either.
        """
        plan = Plan(
            self.site.layout,
            self.run,
            known=request.trainable,
            sequence=self._sequence,
            round=request.round,
            kind=request.kind,
        )
        values: ValueType = "float32" if update.content == "scores" else self.values
        patch = self._closed(update)
        encoded = encode(patch, plan, content=update.content, values=values, residual=self._start.residual)
        rounded = encoded.residual if update.content in ("weights", "difference") else self._start.residual
        self._settle(request, Carried(rounded, dict(self.site.memory)))
        return encoded

    def _closed(self, update: Update) -> Patch:
        """The patch as it may leave: weights encrypted where the job says so, scores and metrics never."""
        if self.cipher is None or update.content not in ("weights", "difference"):
            return update.patch
        return replace(update.patch, sealed=self.cipher.seal(update.patch.values))
