"""Encode a patch as one message and decode it again (docs/wire-format.md).

The encoder takes the encoding that needs the fewest bytes. The decoder checks every field against the receiver's own
plan before it allocates anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.errors import MissingBase, RejectedMessage, WireError
from ..core.exchange import Base, Content, Patch
from ..core.mask import Mask
from .encodings import ENCODINGS, choose_encoding, compute_selection_entropy
from .encodings.encoding import Encoding
from .envelope import HEADER_BYTES, Header, is_kind, read_header, round_up_to_words, write_header
from .formats import FORMATS, WITHOUT_BASE, ValueType
from .number_format import Coding
from .plan import NO_NAME, Plan

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a message costs in bytes, and by what.

    Attributes:
        encoding: name of the selection's encoding.
        values: format of the values.
        scalars_sent: number of values.
        payload_bytes: length of the whole message; FLARE's frames, TLS and polling are not part of it.
        selection_bytes: length of the selection and trainable sections.
        floor_bytes: least number of bytes: the values in their format, and the entropy of the selection given the
            receiver's base.
    """

    encoding: str
    values: ValueType
    scalars_sent: int
    payload_bytes: int
    selection_bytes: int
    floor_bytes: int


@dataclass(frozen=True, kw_only=True)
class Encoded(Cost):
    """A message and its cost.

    Attributes:
        data: uint8 ``(n,)``, the whole message.
        values_bytes: length of the values section.
        residual: ``(P,)`` rounding error of the number format; None for float32 without an earlier residual.
        received: ``(scalars,)`` the values that the receiver reads, if the format rounds; else None.
        base: name of the vector that the message builds on; None: it builds on none.
        request: name of the request that the message is or answers.
    """

    data: np.ndarray
    values_bytes: int
    residual: Tensor | None
    received: Tensor | None = None
    base: str | None = None
    request: str = ""


@dataclass(frozen=True)
class Decoded:
    """The content of a message that passed every check.

    ``trainable`` is None in an update. ``is_difference``: the message has differences, the patch their sums with the
    vector of the receiver.
    """

    header: Header
    patch: Patch
    content: Content
    trainable: Mask | None
    encoding: str
    values: ValueType
    values_bytes: int
    is_difference: bool


# The position is the code in the header. Spelled out, because the order of the Literal types means nothing elsewhere.
_CONTENTS: tuple[Content, ...] = ("weights", "delta", "scores", "metrics", "statistics")
_BASES: tuple[Base, ...] = ("zeros", "previous")
_DIFFERENCE = 2
"""Added to the code of the base where the values are differences to the receiver's vector."""


@dataclass(frozen=True)
class _Selection:
    """An encoded selection, and the least number of bytes for it."""

    encoding: Encoding
    section: bytes
    floor_bytes: int


def encode(
    patch: Patch,
    plan: Plan,
    *,
    content: Content = "weights",
    trainable: Mask | None = None,
    values: ValueType = "float32",
    residual: Tensor | None = None,
    generator: torch.Generator | None = None,
    name_target: Callable[[Tensor | None], tuple[str, str]] | None = None,
) -> Encoded:
    """Return the message that carries a patch.

    Args:
        patch: values and the entries that they belong to.
        plan: the receiver's plan; everything from ``target`` on must be given, if ``name_target`` is not.
        content: kind of the values.
        trainable: second selection of a request, encoded relative to ``patch.mask``.
        values: number format. ``Encoded.residual`` is its rounding error. A quantized format sends weights as
            differences to ``plan.base_vector``; without that, in ``WITHOUT_BASE``.
        residual: residual of the previous message.
        generator: source of the rounding of a quantized format, in the same state for every attempt at a request.
        name_target: returns ``target`` and ``request`` from the values ``(k,)`` that the receiver reads, which it must
            not keep, or from None if these are compressed and not rounded; None: the names are those of the plan.

    Raises:
        RejectedMessage: a value is not finite in this format.
        ValueError: the plan is incomplete, or the patch does not fit its layout.
    """
    check_sender_plan(plan, is_named=name_target is None)
    check_patch(patch, plan)
    if FORMATS[values].sends_differences and content == "weights" and plan.base_vector is None:
        values = WITHOUT_BASE
    selection = _encode_selection(patch.mask, plan.base_mask, plan)
    # In most requests both masks are equal, and the trainable section needs 0 bytes.
    relative = None if trainable is None else _encode_selection(trainable, patch.mask, plan)
    row, coding = (
        FORMATS[values],
        Coding(plan.layout, residual, plan.base_vector if content == "weights" else None, generator),
    )
    # Values of one width are written in place, below.
    coded = None if row.width else row.seal(patch, coding)
    header = _build_header(patch, plan, selection, relative, content, values)
    values_bytes = row.width * patch.mask.count if coded is None else coded.section.size
    start, end = header.values_start, header.values_start + values_bytes
    buffer = np.empty(round_up_to_words(end), np.uint8)
    sections = np.frombuffer(selection.section + (relative.section if relative else b""), np.uint8)
    # np.empty returns old memory: the padding is zeroed, so that equal content has equal bytes and no memory leaks out.
    buffer[HEADER_BYTES : HEADER_BYTES + sections.size] = sections
    buffer[HEADER_BYTES + sections.size : start] = 0
    buffer[end:] = 0
    is_in_place = coded is None
    if coded is None:
        coded = row.seal(patch, coding, buffer[start:end])
    else:
        buffer[start:end] = coded.section
    if name_target is not None:
        # Plain values are at hand in the message: they need not be gathered again.
        is_plain = coded.received is None and is_in_place
        values_read = torch.from_numpy(buffer[start:end].view("<f4")) if is_plain else coded.received
        target, request = name_target(values_read)
        header = replace(header, target=target, request=request)
    # Last: the checksums in the header cover everything else.
    write_header(header, buffer)
    return Encoded(
        data=buffer,
        encoding=selection.encoding.name,
        values=values,
        scalars_sent=patch.mask.count,
        payload_bytes=buffer.size,
        selection_bytes=sections.size,
        values_bytes=values_bytes,
        floor_bytes=values_bytes + selection.floor_bytes + (relative.floor_bytes if relative else 0),
        residual=coded.residual,
        received=coded.received,
        base=None if header.base == NO_NAME else header.base,
        request=header.request,
    )


def compute_min_message_bytes(scalars: int, values: ValueType) -> int:
    """Return the length of the shortest message with so many values, whose selection needs no bytes."""
    return HEADER_BYTES + round_up_to_words(FORMATS[values].compute_min_bytes(scalars))


def _encode_selection(mask: Mask, base_mask: Mask | None, plan: Plan) -> _Selection:
    encoding, section = choose_encoding(mask, base_mask, plan.layout)
    # An encoding may beat the entropy bound, which assumes that all selections of k entries are equally likely.
    return _Selection(encoding, section, min(len(section), compute_selection_entropy(mask, base_mask)))


def _build_header(
    patch: Patch, plan: Plan, selection: _Selection, relative: _Selection | None, content: Content, values: ValueType
) -> Header:
    assert plan.sequence is not None
    assert plan.round is not None
    assert plan.kind is not None
    is_difference = FORMATS[values].sends_differences and content == "weights" and plan.base_vector is not None
    builds_on_base = is_difference or patch.base == "previous" or selection.encoding.requires_base
    return Header(
        encoding=selection.encoding.code,
        trainable=relative.encoding.code if relative else 0,
        values=FORMATS[values].code,
        content=_CONTENTS.index(content),
        patch_base=_BASES.index(patch.base) + _DIFFERENCE * is_difference,
        round=plan.round,
        sequence=plan.sequence,
        base=(plan.base or NO_NAME) if builds_on_base else NO_NAME,
        target=plan.target or NO_NAME,
        request=plan.request or NO_NAME,
        kind=plan.kind,
        run=bytes.fromhex(plan.run),
        layout=bytes.fromhex(plan.layout.fingerprint),
        scalars=patch.mask.count,
        selection_bytes=len(selection.section),
        trainable_bytes=len(relative.section) if relative else 0,
    )


def decode(data: bytes | bytearray | memoryview | np.ndarray, plan: Plan, site: str = "?") -> Decoded:
    """Return the content of a message after checking every part of it against the receiver's plan.

    No number in the message determines an allocation before it has been checked.

    Args:
        data: the whole message.
        plan: the receiver's plan.
        site: the sender's name as FLARE authenticated it; used in errors only.

    Raises:
        RejectedMessage: the message is malformed or damaged, or belongs to another run, model, round or request; the
            code distinguishes these cases.
        MissingBase: the message refers to a mask or a vector that this receiver does not hold.
    """
    try:
        return _decode(_view_buffer(data, site), plan)
    except WireError as error:
        raise error.attach_site(site) from error


def read_names(data: bytes | bytearray | memoryview | np.ndarray, site: str = "?") -> Header:
    """Return the header of a message, whose names a receiver needs to build its plan.

    Raises:
        RejectedMessage: the message is malformed or damaged.
    """
    try:
        return read_header(_view_buffer(data, site))
    except WireError as error:
        raise error.attach_site(site) from error


def read_summary(data: np.ndarray) -> tuple[Header, Content]:
    """Return the header of a message and the content that it states, for a sender's own log.

    Raises:
        RejectedMessage: the bytes are no message.
    """
    header = read_names(data)
    return header, find_by_code(dict(enumerate(_CONTENTS)), header.content, "content")


def _view_buffer(data: bytes | bytearray | memoryview | np.ndarray, site: str) -> np.ndarray:
    """Return the message as contiguous uint8 ``(n,)``, without a copy where possible."""
    try:
        buffer = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    except (BufferError, TypeError) as error:
        raise RejectedMessage("E_DTYPE", "message", "contiguous bytes", type(data).__name__, site) from error
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise RejectedMessage("E_DTYPE", "message", "uint8 (n,)", f"{buffer.dtype} {buffer.shape}", site)
    return np.ascontiguousarray(buffer)


def _decode(buffer: np.ndarray, plan: Plan) -> Decoded:
    # First of all checks: the checksums read the whole message, and a message of gigabytes is not worth that.
    if buffer.size > (limit := plan.max_message_bytes):
        raise RejectedMessage("E_LEN", "message", f"at most {limit} bytes", buffer.size)
    header = read_header(buffer)
    check_identity(header, plan)
    encodings = {encoding.code: encoding for encoding in ENCODINGS.values()}
    encoding = find_by_code(encodings, header.encoding, "encoding")
    value_format = find_by_code({row.code: name for name, row in FORMATS.items()}, header.values, "values", "E_DTYPE")
    content = find_by_code(dict(enumerate(_CONTENTS)), header.content, "content")
    is_difference = (
        FORMATS[value_format].sends_differences and content == "weights" and header.patch_base >= _DIFFERENCE
    )
    base = find_by_code(dict(enumerate(_BASES)), header.patch_base - _DIFFERENCE * is_difference, "base")
    relative = find_by_code(encodings, header.trainable, "trainable encoding") if header.trainable else None
    # Before the base: a request that comes back as an update is no reason to send the whole model again.
    if plan.is_request not in (None, relative is not None):
        expected, found = ("a request", "an update") if plan.is_request else ("an update", "a request")
        raise RejectedMessage("E_KIND", "trainable", expected, found)
    check_base(header, base, encoding, plan, is_difference=is_difference)
    # Every size is known to be right before a section is decoded: first the number of values, then the exact length.
    if header.scalars > plan.layout.size:
        raise RejectedMessage("E_SIZE", "scalars", f"at most {plan.layout.size}", header.scalars)
    start = header.values_start
    end = start + FORMATS[value_format].measure(buffer[start:], header.scalars, plan.layout)
    if buffer.size != round_up_to_words(end):
        raise RejectedMessage("E_LEN", "message", round_up_to_words(end), buffer.size)
    selection_end = HEADER_BYTES + header.selection_bytes
    trainable_end = selection_end + header.trainable_bytes
    # Canonical form: one message has one sequence of bytes. Free bits would let two ends disagree on their bases
    # and would carry data past every other check.
    if buffer[trainable_end:start].any() or buffer[end:].any():
        raise RejectedMessage("E_CANON", "padding", "zero bytes", "other bytes")
    mask = encoding.decode(buffer[HEADER_BYTES:selection_end], plan.base_mask, plan.layout)
    if mask.count != header.scalars:
        raise RejectedMessage("E_NNZ", "scalars", f"{mask.count} selected entries", header.scalars)
    if relative is None and header.trainable_bytes:
        raise RejectedMessage("E_LEN", "trainable", "0 bytes", header.trainable_bytes)
    trainable = relative.decode(buffer[selection_end:trainable_end], mask, plan.layout) if relative else None
    values = buffer[start:end]
    base_vector = plan.base_vector if is_difference else None
    return Decoded(
        header,
        patch=Patch(FORMATS[value_format].open(values, mask, plan.layout, base_vector), mask, base),
        content=content,
        trainable=trainable,
        encoding=encoding.name,
        values=value_format,
        values_bytes=values.size,
        is_difference=is_difference,
    )


def check_sender_plan(plan: Plan, *, is_named: bool = True) -> None:
    """Raise ValueError unless the plan identifies a request, with its names if they are not computed later."""
    names = (plan.target, plan.request) if is_named else ()
    given = (*names, plan.sequence, plan.round, plan.kind)
    if None in given or not is_kind(plan.kind or ""):
        raise ValueError(
            "plan: a sender needs target, request, sequence, round and a kind of 1 to 16 printable ASCII characters, "
            f"found {plan}"
        )


def check_patch(patch: Patch, plan: Plan) -> None:
    """Raise ValueError unless the patch fits the plan's layout and base."""
    total, shape = plan.layout.size, tuple(patch.source.shape)
    if patch.mask.size != total:
        raise ValueError(f"patch.mask: expected a mask of the layout's {total} entries, found {patch.mask}")
    # A source of any other size would be gathered without an error and send the wrong entries.
    if shape not in ((patch.mask.count,), (total,)):
        raise ValueError(f"patch.source: expected shape ({patch.mask.count},) or ({total},), found {shape}")
    has_base = plan.base_mask is not None or plan.base_vector is not None or patch.base == "previous"
    if has_base and plan.base is None:
        raise ValueError("plan.base: a message over a vector needs its name")


def check_identity(header: Header, plan: Plan) -> None:
    """Raise RejectedMessage unless the message is of this run, model and request."""
    for code, field, expected, found in (
        # The layout comes before the run: the run's id depends on it, so another model would always show as E_RUN.
        ("E_LAYOUT", "layout", bytes.fromhex(plan.layout.fingerprint), header.layout),
        ("E_RUN", "run", bytes.fromhex(plan.run), header.run),
        ("E_KIND", "kind", plan.kind, header.kind),
        ("E_ROUND", "round", plan.round, header.round),
        ("E_REPLAY", "sequence", plan.sequence, header.sequence),
        ("E_REPLAY", "target", plan.target, header.target),
        ("E_REPLAY", "request", plan.request, header.request),
    ):
        if expected is not None and found != expected:
            raise RejectedMessage(code, field, _format_field(expected), _format_field(found))


def check_base(header: Header, base: Base, encoding: Encoding, plan: Plan, *, is_difference: bool) -> None:
    """Check that the receiver holds the vector that the message builds on.

    Raises:
        MissingBase: the receiver does not hold it; the sender can send the full model instead.
        RejectedMessage: the message names a vector that it does not use.
    """
    if encoding.requires_base or base == "previous" or is_difference:
        lacks = (encoding.requires_base and plan.base_mask is None) or (is_difference and plan.base_vector is None)
        if lacks or header.base != plan.base:
            raise MissingBase("E_NOT_HELD", "base", plan.base, header.base)
    # An unused field must be zero: a message has one valid form, and no data can be hidden in it.
    elif header.base != NO_NAME:
        raise RejectedMessage("E_CANON", "base", NO_NAME, header.base)


def find_by_code(table: Mapping[int, T], code: int, field: str, error: str = "E_VERSION") -> T:
    """Return what has ``code`` in the header.

    Raises:
        RejectedMessage: nothing has.
    """
    if code not in table:
        raise RejectedMessage(error, field, sorted(table), code)
    return table[code]


def _format_field(value: Any) -> Any:
    """Return bytes as hex digits for an error text, any other value unchanged."""
    return value.hex() if isinstance(value, bytes) else value
