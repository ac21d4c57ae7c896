"""Models: each message carries the delta to the model that its receiver holds, or the whole model.

Updates: each message carries the largest entries of a delta, and the sender adds the others to its next one.

Error feedback as in Stich et al. 2018 (arXiv 1809.07599), Algorithm 1, and docs/algorithms.md, section 7.4, for the
updates of any algorithm. An update that does not count takes nothing with it: the next one starts from the residual
before it.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...compute.structure.nodes import clip_variances
from ...core.errors import MissingBase, RejectedMessage
from ...core.exchange import Patch
from ...core.mask import Mask
from ...core.params import Layout
from ...core.seeds import make_generator
from ...wire.codec import Decoded, Encoded, decode, encode
from ...wire.formats import uncompress
from ...wire.plan import Plan
from ..link import ServerLink, Vector, name_request
from .arrays import Arrays, Specs, build_layout
from .settings import StreamSettings, find_buffers, find_candidates, select_entries


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


@dataclass(frozen=True)
class SentUpdate:
    """An update after encoding.

    Attributes:
        encoded: the message.
        plan: plan of the message.
        residual: float32 ``(P,)``, what the sender keeps if the update counts; None: nothing.
    """

    encoded: Encoded
    plan: Plan
    residual: Tensor | None = None


def encode_update(
    update: Tensor,
    request: HeldModel,
    residual: Tensor | None,
    settings: StreamSettings,
    *,
    run: str,
    kind: str,
    is_delta: bool,
    missing: Collection[str] = (),
) -> SentUpdate:
    """Return the message of an update and what is left to send.

    Args:
        update: float32 ``(P,)`` weights or delta, in the layout of the request.
        request: the model that was trained.
        residual: float32 ``(P,)``, what earlier updates left; None: nothing.
        settings: what to send.
        run: 16 hex digits that identify the run.
        kind: kind of the message.
        is_delta: whether ``update`` is a delta.
        missing: arrays that the update does not have; ``update`` is 0 there.

    Raises:
        RejectedMessage: a value is infinite.
        UndefinedScores: a value is NaN.
    """
    layout = build_layout(request.specs)
    plan = _build_plan(request, layout, run, kind)
    candidates = find_candidates(layout, settings, missing)
    generator = make_generator(int(request.request, 16) >> 1, "stream", kind)
    if settings.is_exact and not is_delta:
        # By bits: entries that the site has not changed, or a filter has put back, need not travel.
        changed = candidates & Mask(update.view(torch.int32) != request.vector.view(torch.int32))
        candidates = changed if changed.count else candidates
        whole = encode(Patch.from_vector(update, candidates), plan, values=settings.values, generator=generator)
        return SentUpdate(whole, plan)
    total = _compute_delta(update, None if is_delta else request.vector, layout, missing)
    feeds_back = settings.error_feedback and not settings.is_exact
    if feeds_back and residual is not None and residual.shape == total.shape:
        total += residual
    mask = select_entries(total, candidates, layout, settings.keep)
    patch = Patch.from_vector(total, mask, "previous")
    encoded = encode(patch, plan, content="delta", values=settings.values, generator=generator)
    if not feeds_back:
        return SentUpdate(encoded, plan)
    return SentUpdate(encoded, plan, _keep(total, mask, encoded.residual, layout, settings))


def _compute_delta(update: Tensor, received: Tensor | None, layout: Layout, missing: Collection[str]) -> Tensor:
    """Return a delta, or weights minus those ``received``, ``(P,)``."""
    delta = update.clone() if received is None else update - received
    if missing:
        # The site did not train these arrays to 0. Without this, minus their weights would enter the residual.
        delta[Mask.from_tensors(layout, lambda spec: spec.name in missing).bits] = 0
    return delta


def _keep(total: Tensor, mask: Mask, rounded_off: Tensor | None, layout: Layout, settings: StreamSettings) -> Tensor:
    """Return what an update of the entries ``mask`` leaves of ``total`` ``(P,)``."""
    # Entries that never travel would only add up. The deltas of running statistics have no sum that means anything:
    # each leads from the received value to the site's own, and two of them would lead past it.
    kept = find_candidates(layout, settings) - find_buffers(layout)
    residual = torch.where(kept.bits, total, 0.0)
    sent = mask & kept
    return sent.put(torch.zeros(sent.count) if rounded_off is None else sent.take(rounded_off), residual)


def name_update(request: HeldModel, kind: str) -> str:
    """Return the name of the answer to a request in one stream."""
    return name_request("", kind, request.round, request.target)


def decode_update(
    message: np.ndarray, request: HeldModel, *, run: str, kind: str, is_delta: bool, site: str = "?"
) -> tuple[Decoded, Plan, Tensor]:
    """Return the message, its plan, and the weights or the delta ``(P,)`` that it carries.

    Args:
        message: uint8 ``(n,)``.
        request: the model that the receiver sent: weights are this model plus the delta of the message.
        run: 16 hex digits that identify the run.
        kind: kind of the message.
        is_delta: whether the update is a delta.
        site: name of the sender, for errors.

    Raises:
        RejectedMessage: the message is malformed, damaged, or answers another request.
        MissingBase: it refers to another model.
    """
    layout = build_layout(request.specs)
    plan = _build_plan(request, layout, run, kind)
    decoded = decode(message, plan, site)
    patch = decoded.patch
    expected_base = {"weights": "zeros", "delta": "previous"}.get(decoded.content)
    if patch.base != expected_base or (is_delta and decoded.content == "weights"):
        raise RejectedMessage("E_KIND", "content", "a delta" if is_delta else "weights or a delta", decoded.content)
    if decoded.content == "weights":
        reached = patch.write_into(request.vector.clone())
    else:
        reached = patch.mask.put(patch.mask.take(request.vector) + patch.values, request.vector.clone())
    # A running variance is 0 where it would be below, as in the rounds of a method.
    clipped = clip_variances(reached, Mask.full(layout.size), layout)
    if not is_delta:
        return decoded, plan, clipped
    return decoded, plan, torch.where(clipped == reached, patch.to_vector(), -request.vector)


def _build_plan(request: HeldModel, layout: Layout, run: str, kind: str) -> Plan:
    return Plan(
        layout,
        run,
        base=request.target,
        target=request.target,
        request=name_update(request, kind),
        sequence=0,
        round=request.round,
        kind=kind,
    )
