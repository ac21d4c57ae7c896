"""Models: each message carries the delta to the model that its receiver holds, or the whole model."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...compute.structure.norms import clip_variances
from ...core.errors import MissingBase, RejectedMessage
from ...core.exchange import Patch
from ...core.mask import Mask
from ...core.params import Layout
from ...core.seeds import make_generator
from ...wire.codec import decode, encode
from ...wire.formats import uncompress
from ...wire.messages import Decoded, Encoded
from ...wire.plan import Plan
from ..link import ServerLink, Vector, name_request
from .arrays import Arrays, Specs, build_layout
from .settings import StreamSettings, find_candidates, select_entries


@dataclass(frozen=True)
class HeldModel:
    """A model as a request has carried it.

    Attributes:
        specs: its arrays.
        vector: float32 ``(P,)``.
        target: name of the vector that the receiver holds.
        request: name of the request.
        round: round of the request.
    """

    specs: Specs
    vector: Tensor
    target: str
    request: str
    round: int


@dataclass(frozen=True)
class SentModel:
    """A model after encoding.

    Attributes:
        model: what the sender has, to which it adds the deltas of updates.
        received: what the receivers hold.
        plan: plan of the message.
        encoded: the message.
        has_specs: whether the message needs the specs beside it.
        is_known: whether the receiver knows the layout.
    """

    model: HeldModel
    received: Vector
    plan: Plan
    encoded: Encoded
    has_specs: bool
    is_known: bool


class ModelSender:
    """Encodes the models of one stream for its receivers.

    What the receivers hold is a :class:`~flare_sparse.rounds.link.ServerLink`, as of the sites of a method. A receiver
    that has not answered the last message gets the whole model: it may hold either of two models.

    Args:
        run: 16 hex digits that identify the run.
        kind: kind of the messages.
    """

    def __init__(self, run: str, kind: str):
        self._run, self._kind = run, kind
        self._link = ServerLink()
        self._sent: dict[str, SentModel] = {}

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
        name, last = receiver or "", self._sent.get(receiver or "")
        held = self._link.find_base(name) if last is not None and last.model.specs == arrays.specs else None
        base = None if settings.is_exact else held
        for other in self._sent.values():
            is_same = other.model.round == round_ and other.model.specs == arrays.specs
            is_same &= (other.plan.base, other.has_specs) == (base and base.name, base is None)
            is_same &= other.is_known == (held is not None)
            if is_same and torch.equal(other.model.vector, arrays.vector):
                sent = other
                break
        else:
            sent = self._encode(arrays, round_, settings, base, is_known=held is not None)
        self._sent[name] = sent
        # Not known from now on: if this message or its answer is lost, the next one is whole.
        self._link = self._link.forget([name])
        return sent

    def accept(self, receiver: str, answer: str) -> None:
        """Take note of an answer, which counts, and whose sender holds the model of the last message to it."""
        if receiver in self._sent:
            # Receivers may be sent models of their own.
            self._link = self._link.add_commit(
                {receiver: self._sent[receiver].received}, {receiver: answer}, {}, models=len(self._sent)
            )

    def get_counted(self, receiver: str) -> str | None:
        """Return the name of a receiver's last answer that counts."""
        return self._link.counted.get(receiver)

    def forget(self, receiver: str) -> None:
        """Send the whole model next."""
        self._link = self._link.forget([receiver])

    def find_model(self, target: str, receiver: str | None = None) -> HeldModel | None:
        """Return the model of the last message to a receiver; None if it led to another vector."""
        sent = self._sent.get(receiver or "")
        return sent.model if sent is not None and sent.model.target == target else None

    def _encode(
        self, arrays: Arrays, round_: int, settings: StreamSettings, base: Vector | None, *, is_known: bool
    ) -> SentModel:
        layout = build_layout(arrays.specs)
        plan = Plan(layout, self._run, base.name if base else None, sequence=0, round=round_, kind=self._kind)
        if base is None:
            # A receiver without the layout allocates by the length of the message, which compression would hide.
            values = settings.values if is_known else uncompress(settings.values)
            patch = Patch.from_vector(arrays.vector, Mask.full(layout.size))
        else:
            assert base.values is not None, "a sender keeps the vectors that it has sent"
            delta, values = arrays.vector - base.values, settings.values
            mask = select_entries(delta, find_candidates(layout, settings), layout, settings.keep)
            patch = Patch.from_vector(delta, mask, "previous")
        received = Vector("", Mask.full(layout.size))

        def name(rounded: Tensor | None) -> tuple[str, str]:
            nonlocal received
            read = patch if rounded is None else replace(patch, source=rounded)
            values = _apply(read, base.values if base else None, layout)
            received = Vector.of(Patch.from_vector(values, received.mask), keeps_values=True)
            return received.name, name_request("", self._kind, round_, received.name)

        # A message that leads to the same model is rounded alike.
        seed = int(Patch.from_vector(arrays.vector, received.mask).digest[:15], 16)
        generator = make_generator(seed, "stream", self._kind, round_)
        encoded = encode(
            patch, plan, content="weights" if base is None else "delta", values=values, generator=generator, name=name
        )
        model = HeldModel(arrays.specs, arrays.vector, received.name, encoded.request, round_)
        return SentModel(model, received, plan, encoded, base is None, is_known)


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
        plan = Plan(layout, self._run, base.target if base else None, kind=self._kind)
        decoded = decode(message, plan, sender)
        if decoded.content not in ("weights", "delta") or (decoded.content == "weights") != (
            decoded.patch.base == "zeros"
        ):
            raise RejectedMessage("E_KIND", "content", "a model, or a delta to one", decoded.content, sender)
        if decoded.content == "weights" and not decoded.patch.mask.is_full:
            raise RejectedMessage("E_NNZ", "model", f"all {layout.size} values", decoded.patch.mask.count, sender)
        vector = _apply(decoded.patch, base.vector if base else None, layout)
        # The sender names what it expects: both ends must hold the same bits after any number of rounds.
        if (name := Vector.of(Patch.from_vector(vector, Mask.full(layout.size))).name) != decoded.target:
            raise MissingBase("E_NOT_HELD", "target", decoded.target, name, sender)
        self.held = HeldModel(specs, vector, decoded.target, decoded.request, decoded.round)
        return decoded, plan


def _apply(patch: Patch, base: Tensor | None, layout: Layout) -> Tensor:
    """Return the model ``(P,)`` of a message; a delta is added to ``base``.

    A running variance is 0 where it would be below, as in the rounds of a method.
    """
    if patch.base == "zeros" or base is None:
        model = patch.to_vector()
    else:
        model = patch.mask.put(patch.mask.take(base) + patch.values, base.clone())
    return clip_variances(model, Mask.full(layout.size), layout)
