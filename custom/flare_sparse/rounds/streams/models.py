"""Models: each message carries the delta to the model that its receiver holds, or the whole model."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...core.errors import MissingBase, RejectedMessage
from ...core.exchange import Content, Patch
from ...core.mask import Mask
from ...core.seeds import make_generator
from ...wire.codec import decode, encode
from ...wire.formats import ValueType, uncompress
from ...wire.messages import Decoded, Encoded
from ...wire.plan import Plan
from .arrays import Arrays, Specs, build_layout
from .settings import StreamSettings, find_candidates, select_entries


@dataclass(frozen=True)
class HeldModel:
    """A model that one end holds and the other knows that it holds.

    Attributes:
        specs: its arrays.
        vector: float32 ``(P,)``.
        sequence: number of the message that carried it.
        round: round of that message.
    """

    specs: Specs
    vector: Tensor
    sequence: int
    round: int


@dataclass(frozen=True)
class SentModel:
    """A model after encoding.

    Attributes:
        model: what the sender has, to which it adds the deltas of updates.
        received: float32 ``(P,)``, what the receivers hold.
        plan: plan of the message.
        encoded: the message.
        has_specs: whether the message needs the specs beside it.
    """

    model: HeldModel
    received: Tensor
    plan: Plan
    encoded: Encoded
    has_specs: bool


class ModelSender:
    """Encodes the models of one stream for its receivers.

    A receiver that has not answered the last message gets the whole model: it may hold either of two models.

    Args:
        run: 16 hex digits that identify the run.
        kind: kind of the messages.
    """

    def __init__(self, run: str, kind: str):
        self._run, self._kind = run, kind
        self._sent: dict[int, SentModel] = {}
        self._last: dict[str, int] = {}
        self._acknowledged: set[str] = set()

    def encode(self, arrays: Arrays, round_: int, settings: StreamSettings, receiver: str | None = None) -> SentModel:
        """Return the message for a receiver; equal models for receivers that hold the same one share a message.

        Args:
            arrays: the model.
            round_: round of the message.
            settings: what to send.
            receiver: name of the receiver; None: several, of which it is not known what they hold.

        Raises:
            RejectedMessage: a value is NaN or infinite.
            ConfigError: the mask names no array.
        """
        held = self._sent[self._last[receiver]] if receiver in self._acknowledged else None
        is_known = held is not None and held.model.specs == arrays.specs
        base = held if is_known and not settings.is_exact else None
        sequence = _derive_sequence(arrays.vector, round_, base.model.sequence if base else int(is_known))
        if sequence not in self._sent:
            model = HeldModel(arrays.specs, arrays.vector, sequence, round_)
            sent = self._encode_delta(model, base, settings) if base else self._encode_whole(model, is_known, settings)
            self._sent[sequence] = sent
        # Not acknowledged from now on: if this message or its answer is lost, the next one is whole.
        self._acknowledged.discard(receiver or "")
        self._last[receiver or ""] = sequence
        self._sent = {number: sent for number, sent in self._sent.items() if number in self._last.values()}
        return self._sent[sequence]

    def acknowledge(self, receiver: str) -> None:
        """Remember that a receiver has answered the last message, and so holds its model."""
        if receiver in self._last:
            self._acknowledged.add(receiver)

    def forget(self, receiver: str) -> None:
        """Send the whole model next."""
        self._acknowledged.discard(receiver)

    def find_model(self, sequence: int, receiver: str | None = None) -> HeldModel | None:
        """Return the model of the last message to a receiver; None if it was another message."""
        return self._sent[sequence].model if self._last.get(receiver or "") == sequence else None

    def _encode_whole(self, model: HeldModel, is_known: bool, settings: StreamSettings) -> SentModel:
        # A receiver without the layout allocates by the length of the message, which compression would hide.
        values = settings.values if is_known else uncompress(settings.values)
        plan = Plan(build_layout(model.specs), self._run, sequence=model.sequence, round=model.round, kind=self._kind)
        patch = Patch.from_vector(model.vector, Mask.full(plan.layout.size))
        return self._finish(model, patch, plan, values, None)

    def _encode_delta(self, model: HeldModel, base: SentModel, settings: StreamSettings) -> SentModel:
        layout = build_layout(model.specs)
        delta = model.vector - base.received
        mask = select_entries(delta, find_candidates(layout, settings), layout, settings.keep)
        plan = Plan(
            layout,
            self._run,
            base_sequence=base.model.sequence,
            sequence=model.sequence,
            round=model.round,
            kind=self._kind,
        )
        return self._finish(model, Patch.from_vector(delta, mask, "previous"), plan, settings.values, base)

    def _finish(
        self, model: HeldModel, patch: Patch, plan: Plan, values: ValueType, base: SentModel | None
    ) -> SentModel:
        generator = make_generator(model.sequence, "stream", self._kind)
        content: Content = "weights" if base is None else "delta"
        encoded = encode(patch, plan, content=content, values=values, generator=generator)
        # Decoded and added as the receiver does it: both ends must hold the same bits after any number of rounds.
        received = _apply(decode(encoded.data, plan), None if base is None else base.received)
        return SentModel(model, received, plan, encoded, has_specs=base is None)


class ModelReceiver:
    """Decodes the models of one stream.

    Args:
        run: 16 hex digits that identify the run.
        kind: kind of the messages.
        held: the model that this end holds; None: none.
    """

    def __init__(self, run: str, kind: str, held: HeldModel | None = None):
        self._run, self._kind, self.held = run, kind, held

    def decode(self, message: np.ndarray, specs: Specs | None, sender: str = "?") -> tuple[Decoded, Plan]:
        """Decode a message into ``held``.

        Args:
            message: uint8 ``(n,)``.
            specs: the arrays, where the message states them; None: those of the model that this end holds.
            sender: name of the sender, for errors.

        Raises:
            RejectedMessage: the message is malformed, damaged or of another run; ``held`` is unchanged.
            MissingBase: the message is a delta to a model that this end does not hold.
        """
        is_known = self.held is not None and specs in (None, self.held.specs)
        if specs is None:
            if self.held is None:
                raise MissingBase("E_NOT_HELD", "model", "a whole model", "a delta", sender)
            specs = self.held.specs
        layout = build_layout(specs)
        # Every number format takes a byte or more, so that the length of the message bounds what is allocated.
        if not is_known and layout.size > message.size:
            raise RejectedMessage("E_SIZE", "arrays", f"at most {message.size} values", layout.size, sender)
        base = self.held if is_known else None
        plan = Plan(layout, self._run, base_sequence=base.sequence if base else None, kind=self._kind)
        decoded = decode(message, plan, sender)
        if decoded.content not in ("weights", "delta") or (decoded.content == "weights") != (
            decoded.patch.base == "zeros"
        ):
            raise RejectedMessage("E_KIND", "content", "a model, or a delta to one", decoded.content, sender)
        if decoded.content == "weights" and not decoded.patch.mask.is_full:
            raise RejectedMessage("E_NNZ", "model", f"all {layout.size} values", decoded.patch.mask.count, sender)
        vector = _apply(decoded, base.vector if base else None)
        self.held = HeldModel(specs, vector, decoded.sequence, decoded.round)
        return decoded, plan


def _apply(decoded: Decoded, base: Tensor | None) -> Tensor:
    """Return the model ``(P,)`` of a message; a delta is added to ``base``."""
    patch = decoded.patch
    if decoded.content == "weights" or base is None:
        return patch.to_vector()
    return patch.mask.put(patch.mask.take(base) + patch.values, base.clone())


def _derive_sequence(vector: Tensor, round_: int, base: int) -> int:
    """Return the number of a message, which its content determines, so that equal messages have equal numbers."""
    digest = hashlib.sha256(f"{round_},{base},".encode())
    digest.update(np.ascontiguousarray(vector.numpy(), "<f4").data)
    # 0 is the number of no message.
    return (int.from_bytes(digest.digest()[:8], "little") >> 1) or 1
