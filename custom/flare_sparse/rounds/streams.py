"""The models and updates of any FLARE job as messages of differences, at the server and at a site.

Both directions carry the same: what a vector changes of the one that the other end holds too. A site receives the
difference of the server's model to what it holds, and sends that of what it trained.

Error feedback as in Stich et al. 2018 (arXiv 1809.07599), Algorithm 1, and docs/algorithms.md, section 7.4, for the
updates of any algorithm. An update that does not count takes nothing with it: the next one starts from the residual
before it. What a message to a site leaves out is in the difference of the next one.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import safetensors.torch
import torch
from pydantic import AfterValidator, Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..compute.structure.nodes import clip_variances
from ..core.checkpoint.writing import replace_atomically
from ..core.errors import ConfigError, MissingBase, RejectedMessage
from ..core.exchange import Base, Content, Patch
from ..core.mask import Mask, floor_fraction, top_k
from ..core.params import Layout
from ..core.seeds import make_generator
from ..core.settings import Settings
from ..wire.codec import decode, encode, read_names
from ..wire.formats import ValueType, load_format
from ..wire.plan import Plan, is_name
from .link import Answer, ServerLink, SiteLink, Vector, name_request

CONTENTS: dict[Base, Content] = {"zeros": "weights", "previous": "delta"}
"""What a message says of a patch, by its base."""
KIND = "model"
"""Kind of all messages."""
_LOG = logging.getLogger(__name__)


class StreamSettings(Settings):
    """What a sender sends."""

    keep: float = Field(1.0, gt=0, le=1)
    """share of the entries in a message; running statistics travel whole"""
    values: Annotated[ValueType, AfterValidator(load_format)] = "float32"
    """number format"""
    error_feedback: bool = True
    """whether a site adds what it did not send to its next update"""
    mask: tuple[str, ...] | None = Field(None, min_length=1)
    """patterns of names, as in a shell; only arrays that match one travel. null: all arrays"""

    @property
    def is_exact(self) -> bool:
        """Whether messages carry all values without loss."""
        return self.keep == 1 and self.mask is None and self.values in ("float32", "float32_zstd")

    def find_candidates(self, layout: Layout, missing: Collection[str] = ()) -> Mask:
        """Return the entries that may travel: of arrays that the mask names and that are not ``missing``.

        Raises:
            ConfigError: the mask names no array.
        """
        patterns = ("*",) if self.mask is None else self.mask
        named = {spec.name for spec in layout.tensors if any(fnmatchcase(spec.name, pattern) for pattern in patterns)}
        if not named:
            names = ", ".join(spec.name for spec in layout.tensors[:5])
            raise ConfigError(f"mask: no array matches {list(patterns)}; the arrays are {names}, ...")
        return Mask.from_tensors(layout, lambda spec: spec.name in named and spec.name not in missing)


@dataclass(frozen=True, eq=False)
class Model:
    """A model that a message has carried.

    Attributes:
        layout: its layout.
        vector: float32 ``(P,)``: at a site what it holds; at the server its own, to which it adds what sites changed.
        held: the vector that the site holds.
        round: round of the message.
        types: what its arrays are restored to, for who does that.
    """

    layout: Layout
    vector: Tensor
    held: Vector
    round: int
    types: Mapping[str, Any]

    @classmethod
    def from_vector(cls, layout: Layout, vector: Tensor, t: int, types: Mapping[str, Any]) -> Self:
        """Return a model that a site holds with all its bits."""
        held = Vector.of(Patch.from_vector(vector, Mask.full(layout.size)), keeps_values=True)
        return cls(layout, vector, held, t, types)

    @property
    def answer(self) -> str:
        """Name of the answer of a site that has trained this model."""
        return name_request("", KIND, self.round, self.held.name)

    def build_answer_plan(self, run: str) -> Plan:
        """Return the plan of the update of a site that has trained this model."""
        name = self.held.name
        return Plan(self.layout, run, name, target=name, request=self.answer, sequence=0, round=self.round, kind=KIND)


class ServerStream:
    """The server's end: encodes models, decodes updates.

    What sites hold is a :class:`~flare_sparse.rounds.link.ServerLink`, as of the sites of a method. A site that has not
    answered the last message gets the whole model: it may hold either of two models.

    Args:
        run: 16 hex digits that identify the run.
    """

    def __init__(self, run: str):
        self._run = run
        self._link = ServerLink()
        self._sent: dict[str, Model] = {}
        # Keep by what a site holds, for the last model: the message (None: whole), and the model it leads to.
        self._messages: dict[tuple[str, str, int], tuple[np.ndarray | None, Model]] = {}

    def encode(self, model: Model, settings: StreamSettings, site: str) -> tuple[np.ndarray | None, str | None]:
        """Return the message of a model, and the name of the site's last answer that counts.

        Sites that hold the same model share a message. None in its place: the site needs the whole model.

        Raises:
            RejectedMessage: a value is NaN or infinite.
            ConfigError: the mask names no array.
        """
        last = self._sent.get(site)
        base = self._link.find_base(site) if last is not None and last.layout == model.layout else None
        key = (base.name if base else "", model.held.name, model.round)
        if key not in self._messages:
            self._messages = {other: sent for other, sent in self._messages.items() if other[1:] == key[1:]}
            self._messages[key] = (None, model) if base is None else self._encode(model, settings, base)
        message, self._sent[site] = self._messages[key]
        # Forget what the site holds: if this message or its answer is lost, the next one is whole.
        self._link = self._link.forget([site])
        return message, self._link.counted.get(site)

    def _encode(self, model: Model, settings: StreamSettings, base: Vector) -> tuple[np.ndarray, Model]:
        assert base.values is not None, "a server keeps the vectors that it has sent"
        layout, start, sent = model.layout, base.values, model
        plan = Plan(layout, self._run, base.name, sequence=0, round=model.round, kind=KIND)
        patch = select_change(model.vector, start, layout, settings)

        def name_target(rounded: Tensor | None) -> tuple[str, str]:
            nonlocal sent
            read = patch if rounded is None else replace(patch, source=rounded)
            reached = Model.from_vector(layout, apply_change(read, start, layout), model.round, model.types)
            sent = replace(reached, vector=model.vector)
            return sent.held.name, sent.answer

        # A message that leads to the same model is rounded alike.
        generator = make_generator(int(model.held.name, 16) >> 4, "stream", model.round)
        content = CONTENTS[patch.base]
        encoded = encode(
            patch, plan, content=content, values=settings.values, generator=generator, name_target=name_target
        )
        return encoded.data, sent

    def decode_update(self, message: np.ndarray, site: str, *, is_delta: bool) -> tuple[Model, Tensor]:
        """Return the model that a site has trained, and its weights or its delta ``(P,)``.

        Raises:
            RejectedMessage: the message is malformed or damaged, or answers another request.
        """
        model, update = decode_update(message, self._sent.get(site), self._run, site, is_delta=is_delta)
        self._link = self._link.add_commit({site: model.held}, {site: model.answer}, {}, models=len(self._sent))
        return model, update


class SiteStream:
    """A site's end: decodes models, encodes updates. Between sites (swarm) it decodes updates of its model, too.

    Args:
        run: 16 hex digits that identify the run.
        file: where the residuals are kept, so that a process which restarts goes on from them; None: in memory alone.
    """

    def __init__(self, run: str, file: Path | None = None):
        self._run, self._file = run, file
        self._link = SiteLink[Tensor | None](answers=load_answers(file))
        self._counted: str | None = None
        self.model: Model | None = None

    @property
    def last(self) -> str | None:
        """Name of this end's last answer, which counts where a sender cannot tell: a model for several sites."""
        return next(reversed(list(self._link.answers)), None)

    def decode_update(self, message: np.ndarray, site: str, *, is_delta: bool) -> tuple[Model, Tensor]:
        """Return the model that another site has trained, and its weights or its delta ``(P,)``.

        Raises:
            RejectedMessage: as of :meth:`ServerStream.decode_update`.
        """
        return decode_update(message, self.model, self._run, site, is_delta=is_delta)

    def receive(self, model: Model, counted: object) -> None:
        """Hold a model, and take note of the name of the last answer that counts.

        Raises:
            RejectedMessage: it is no name.
        """
        if counted is not None and not is_name(counted):
            raise RejectedMessage("E_KIND", "counted", "16 hex digits", type(counted).__name__)
        self.model, self._counted = model, None if counted is None else str(counted)

    def decode(self, message: np.ndarray, t: int) -> Model:
        """Return the model of the message of round ``t``.

        Raises:
            RejectedMessage: the message is malformed, damaged or of another run.
            MissingBase: it is a difference to a model that this end does not hold.
        """
        held = self.model
        if held is None:
            raise MissingBase("E_NOT_HELD", "model", "a whole model", "a difference")
        patch, target = decode_change(message, Plan(held.layout, self._run, held.held.name, round=t, kind=KIND))
        vector = apply_change(patch, held.vector, held.layout)
        model = Model.from_vector(held.layout, vector, t, held.types)
        # The server names what it expects: both ends must hold the same bits after any number of rounds.
        if model.held.name != target:
            raise MissingBase("E_NOT_HELD", "target", target, model.held.name)
        return model

    def encode(
        self, update: Tensor, settings: StreamSettings, *, is_delta: bool = False, missing: Collection[str] = ()
    ) -> np.ndarray:
        """Return the message of an update ``(P,)`` of the model that this end holds: weights, or a delta.

        Args:
            update: float32 ``(P,)``.
            settings: what to send.
            is_delta: whether ``update`` is a delta.
            missing: arrays that the update does not have; ``update`` is 0 there.

        Raises:
            RejectedMessage: no model was received, or a value is infinite.
            UndefinedScores: a value is NaN.
        """
        if self.model is None:
            raise RejectedMessage("E_NOT_HELD", "model", "a request with a model before the update", "none")
        model, layout = self.model, self.model.layout
        feeds_back = settings.error_feedback and not settings.is_exact
        residual = self._link.recall(self._counted, None)[0] if feeds_back else None
        patch = select_change(
            update, None if is_delta else model.vector, layout, settings, residual=residual, missing=missing
        )
        encoded = encode(
            patch,
            model.build_answer_plan(self._run),
            content=CONTENTS[patch.base],
            values=settings.values,
            generator=make_generator(int(model.answer, 16) >> 1, "stream"),
        )
        left = compute_residual(patch, encoded.residual, layout, settings) if feeds_back else None
        self._link = self._link.add_answer(model.answer, self._counted, left)
        # Before the message leaves: the server may count an answer only if the site still knows what it left.
        if self._file is not None and left is not None:
            save_answers(self._file, self._link.answers)
        return encoded.data


def save_answers(file: Path, answers: Mapping[str, Answer[Tensor | None]]) -> None:
    """Replace the file of the residuals of a site's answers, by name."""
    residuals = {name: answer.memory for name, answer in answers.items() if answer.memory is not None}
    after = {name: answers[name].after or "" for name in residuals}
    with replace_atomically(file) as part:
        safetensors.torch.save_file(residuals, part, after)


def load_answers(file: Path | None) -> dict[str, Answer[Tensor | None]]:
    """Return the answers in a file, without any if it is missing; a damaged one is named in the log and left out."""
    if file is None or not file.is_file():
        return {}
    try:
        with safe_open(file, "pt") as content:
            after = content.metadata()
            return {name: Answer(after[name] or None, content.get_tensor(name)) for name in after}
    except (SafetensorError, OSError, KeyError, TypeError) as error:
        _LOG.warning("%s is damaged (%s): what earlier updates left is lost", file, error)
        return {}


def select_change(
    vector: Tensor,
    base: Tensor | None,
    layout: Layout,
    settings: StreamSettings,
    *,
    residual: Tensor | None = None,
    missing: Collection[str] = (),
) -> Patch:
    """Return what travels of ``vector`` ``(P,)``: values of what it changes, or the largest entries of a difference.

    Args:
        vector: what the sender has.
        base: what the receiver holds; None: ``vector`` is a difference already.
        layout: layout of both.
        settings: what to send.
        residual: ``(P,)``, what earlier messages left; None: nothing.
        missing: arrays that the sender does not have.

    Raises:
        ConfigError: the mask names no array.
        UndefinedScores: an entry is NaN.
    """
    candidates = settings.find_candidates(layout, missing)
    if settings.is_exact and base is not None:
        # Compare bits: entries that are unchanged, or that a filter has put back, need not travel.
        changed = candidates & Mask(vector.view(torch.int32) != base.view(torch.int32))
        return Patch.from_vector(vector, changed if changed.count else candidates)
    total = vector.clone() if base is None else vector - base
    # The site did not train these arrays to 0. Without this, minus their weights would enter the residual.
    total[Mask.from_tensors(layout, lambda spec: spec.name in missing).bits] = 0
    if residual is not None and residual.shape == total.shape:
        total += residual
    mask = candidates
    if settings.keep < 1:
        # A running variance that is the sum of differences of different rounds could become negative.
        whole = find_buffers(layout) & candidates
        pool = candidates - whole
        k = min(max(floor_fraction(settings.keep, pool.count), 1), pool.count)
        mask = whole | top_k(total.abs(), k, pool)
    return Patch.from_vector(total, mask, "previous")


def find_buffers(layout: Layout) -> Mask:
    """Return the entries of running statistics."""
    return Mask.from_tensors(layout, lambda spec: spec.role == "buffer")


def compute_residual(patch: Patch, rounded_off: Tensor | None, layout: Layout, settings: StreamSettings) -> Tensor:
    """Return the residual ``(P,)`` of a difference: what the message of its patch does not carry.

    Args:
        patch: the entries of the difference that the message carries; its source is the whole difference.
        rounded_off: ``(P,)`` what rounding took off the values that were sent; None: nothing.
        layout: layout of the vectors.
        settings: say which entries ever travel.
    """
    # Entries that never travel would only add up. The deltas of running statistics have no sum that means anything:
    # each leads from the received value to the site's own, and two of them would lead past it.
    kept = settings.find_candidates(layout) - find_buffers(layout)
    sent = patch.mask & kept
    residual = torch.where(kept.bits, patch.source, 0.0)
    return sent.put(torch.zeros(sent.count) if rounded_off is None else sent.take(rounded_off), residual)


def decode_change(message: np.ndarray, plan: Plan, sender: str = "server") -> tuple[Patch, str]:
    """Return the patch of a message and the name of the vector that it leads to.

    Raises:
        RejectedMessage: the message is malformed or damaged, or not what the plan expects.
    """
    decoded = decode(message, plan, sender)
    if decoded.content != CONTENTS[decoded.patch.base]:
        raise RejectedMessage("E_KIND", "content", "a model, or a difference to one", decoded.content, sender)
    return decoded.patch, decoded.header.target


def decode_update(
    message: np.ndarray, model: Model | None, run: str, site: str, *, is_delta: bool
) -> tuple[Model, Tensor]:
    """Return the model that a site has trained, if it is this one, and its weights or its delta ``(P,)``.

    Raises:
        RejectedMessage: the message is malformed or damaged, or answers another request.
    """
    target = read_names(message, site).target
    if model is None or model.held.name != target:
        raise RejectedMessage("E_REPLAY", "target", "the model of the last request", target, site)
    patch, _ = decode_change(message, model.build_answer_plan(run), site)
    if is_delta and patch.base == "zeros":
        raise RejectedMessage("E_KIND", "content", "a delta", "weights", site)
    reached = apply_change(patch, model.vector, model.layout, clips=False)
    clipped = clip_variances(reached, Mask.full(reached.numel()), model.layout)
    return model, torch.where(clipped == reached, patch.to_vector(), -model.vector) if is_delta else clipped


def apply_change(patch: Patch, base: Tensor, layout: Layout, *, clips: bool = True) -> Tensor:
    """Return ``base`` ``(P,)`` with the values of a patch, or with its differences added.

    Args:
        patch: the content of a message.
        base: what the receiver has.
        layout: layout of both.
        clips: whether a running variance is 0 where it would be below, as in the rounds of a method.
    """
    if patch.base == "zeros":
        vector = patch.write_into(base.clone())
    else:
        vector = patch.mask.put(patch.mask.take(base) + patch.values, base.clone())
    return clip_variances(vector, Mask.full(layout.size), layout) if clips else vector
