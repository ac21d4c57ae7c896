"""A site's end of the wire: reads questions, has the method answer them, writes the answers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..checkpoint.store import Store
from ..encryption import SiteCipher
from ..errors import MissingBase, RejectedMessage
from ..exchange import EVALUATE, Patch, Request, Update
from ..mask import Mask
from ..methods import Method
from ..training import Site
from ..wire.codec import Decoded, Encoded, decode, encode, read_sequence
from ..wire.plan import Plan, ValueType


@dataclass(frozen=True)
class Carried:
    """What a site carries from one answer to the next: what the number format rounded off, what its method keeps."""

    residual: Tensor | None = None
    method: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteSnapshot:
    """What a site must remember to go on after a crash as if nothing had happened; kind and round are of the question
    that it had answered then.
    """

    kind: str
    round: int
    weights: Tensor
    base_mask: Mask | None
    base_sequence: int | None
    carried: Carried


class SiteEndpoint:
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
            self._remember(self.store, read_sequence(data, "server"))
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
        ciphertext_format = self.cipher.ciphertext_format if self.cipher else None
        plan = Plan(
            self.site.layout,
            self.run,
            base_mask=self._known,
            base_sequence=self._base,
            ciphertext_format=ciphertext_format,
        )
        try:
            return decode(data, plan, "server")
        except MissingBase:
            for known, base in reversed(self._earlier):
                with suppress(MissingBase):
                    message = decode(data, replace(plan, base_mask=known, base_sequence=base), "server")
                    if (message.kind, message.round) == self._taken:
                        return message
            raise

    def opened(self, patch: Patch) -> Patch:
        """A patch with values to read, decrypted if need be.

        Raises:
            RejectedMessage: it was not encrypted with this site's key.
        """
        if patch.encrypted is None or self.cipher is None:
            return patch
        return Patch(self.cipher.decrypt(patch.encrypted, patch.mask.count), patch.mask, patch.base)

    def _remember(self, store: Store, asked: int) -> None:
        """What this site was after its last answer before the question ``asked``; what came later was given up."""
        store.delete(asked)
        if (found := store.load(SiteSnapshot)) is None:
            return
        self._sequence, memory = found
        self.site.weights, self._known, self._base = memory.weights, memory.base_mask, memory.base_sequence
        self._answered, self._after, self._saved = (memory.kind, memory.round), memory.carried, self._sequence
        while found is not None and (found[1].kind, found[1].round) == self._answered:
            found = store.load(SiteSnapshot, below=found[0])
        self._taken = self._answered
        self._earlier = [(found[1].base_mask, found[1].base_sequence) if found else (None, None)]
        self._saved_before, self._before = (found[0], found[1].carried) if found else (None, Carried())

    def _settle(self, request: Request, after: Carried) -> None:
        """The answer is ready: on the disk what it leaves behind, and from before its first attempt what was there.

        Raises:
            CheckpointError: it could not be written; then this answer never was.
        """
        again = (request.kind, request.round) == self._answered
        earlier = self._saved_before if again else self._saved
        if self.store is not None:
            memory = SiteSnapshot(request.kind, request.round, self.site.weights, self._known, self._base, after)
            self.store.save(self._sequence, memory, spared=earlier)
            self._saved, self._saved_before = self._sequence, earlier
        self._answered, self._before, self._after = (request.kind, request.round), self._start, after

    def _take(self, patch: Patch) -> None:
        if patch.base == "zeros":
            if patch.mask != self._known:
                self.site.weights.zero_()
            self._known = patch.mask
        patch.write_into(self.site.weights)

    def answer(self, request: Request) -> Update:
        """The method's answer, with the site's judgement of the model it was sent unless it judged another."""
        self.site.reset_usage()
        if request.kind == EVALUATE or not self.site.num_examples:  # who has nothing to learn from can only judge
            nothing = Patch.empty(self.site.layout.size)
            return Update(nothing, "metrics", self.site.num_examples, self.site.evaluate(self.site.weights))
        update = self.method.answer(request, self.site)
        if update.metrics or update.content == "scores":
            return update
        return replace(update, metrics=self.site.evaluate(self.site.weights))

    def build_hello(self, **limits: Any) -> dict[str, str | int | float]:
        """What this site says of itself before it is asked.

        Args:
            limits: of the site's policy, fields of :class:`~flare_sparse.capabilities.Capabilities`.
        """
        return self.method.get_capabilities(self.site).model_copy(update=limits).to_message()

    def encode(self, request: Request, update: Update) -> Encoded:
        """The message that carries ``update`` back; what the number format rounds off goes with the next one.

        Raises:
            RejectedMessage: a value is not finite, or not one that can be encrypted; nothing is sent.
            CheckpointError: what this site must remember could not be written; then nothing may be sent either.
        """
        plan = Plan(
            self.site.layout,
            self.run,
            base_mask=request.trainable,
            sequence=self._sequence,
            round=request.round,
            kind=request.kind,
        )
        values: ValueType = "float32" if update.content == "scores" else self.values
        patch = self._closed(update)
        encoded = encode(patch, plan, content=update.content, values=values, residual=self._start.residual)
        rounded = encoded.residual if update.content in ("weights", "delta") else self._start.residual
        self._settle(request, Carried(rounded, dict(self.site.memory)))
        return encoded

    def _closed(self, update: Update) -> Patch:
        """The patch as it may leave: weights encrypted where the job says so, scores and metrics never."""
        if self.cipher is None or update.content not in ("weights", "delta"):
            return update.patch
        return replace(update.patch, encrypted=self.cipher.encrypt(update.patch.values))
