"""A patch to one buffer and back: the cheapest encoding wins, the receiver checks before it allocates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from ..errors import MissingBase, RejectedMessage, WireError
from ..exchange import Base, Content, EncryptedValues, Patch
from ..mask import Mask
from ..params import Layout
from . import ciphertexts
from . import values as numbers
from .encoding_choice import choose_encoding, compute_selection_entropy
from .encodings import CODES, Encoding
from .envelope import HEADER_BYTES, Header, is_kind, read_header, write_header
from .plan import Plan, ValueFormat, ValueType

CONTENTS: tuple[Content, ...] = get_args(Content)
OVERS: tuple[Base, ...] = get_args(Base)
_NO_MASK = bytes(16)


@dataclass(frozen=True)
class Encoded:
    """A message and what it cost.

    Attributes:
        data: uint8 ``(n,)``, the whole message.
        encoding: of the selection.
        values: number format; ``ckks``: encrypted.
        scalars: values that travel.
        selection_bytes: spent on saying which.
        values_bytes: spent on the values.
        floor_bytes: the values' bytes plus the entropy of the selection given what the receiver knows.
        residual: ``(P,)`` what the format rounded off; None for float32 without an earlier one.
    """

    data: np.ndarray
    encoding: str
    values: ValueFormat
    scalars: int
    selection_bytes: int
    values_bytes: int
    floor_bytes: int
    residual: Tensor | None

    @property
    def payload_bytes(self) -> int:
        return int(self.data.size)


@dataclass(frozen=True)
class Decoded:
    """What a message said, checked. ``trainable`` is None in an answer."""

    patch: Patch
    content: Content
    trainable: Mask | None
    kind: str
    round: int
    sequence: int
    encoding: str
    values: ValueFormat
    selection_bytes: int
    values_bytes: int


def encode(
    patch: Patch,
    plan: Plan,
    *,
    content: Content = "weights",
    trainable: Mask | None = None,
    values: ValueType = "float32",
    residual: Tensor | None = None,
) -> Encoded:
    """The message that carries a patch.

    Args:
        patch: values and where they go.
        plan: what the receiver holds; ``sequence``, ``round`` and ``kind`` must be given.
        content: what the values are.
        trainable: a question's second selection, said relative to ``patch.on``.
        values: number format; what it rounds off is in ``Encoded.residual``. A sealed patch has its own.
        residual: of the message before.

    Raises:
        RejectedMessage: a value is not finite in this format.
        ValueError: the plan is incomplete, or the patch is not one of its layout.
    """
    sequence, round_, kind = _question(plan)
    _fits(patch, plan)
    encoding, selection = choose_encoding(patch.mask, plan.base_mask, plan.layout)
    written: ValueFormat = values if patch.encrypted is None else "ckks"
    second, trained = (None, b"") if trainable is None else choose_encoding(trainable, patch.mask, plan.layout)
    header = Header(
        encoding=encoding.code,
        trainable=second.code if second else 0,
        values=ciphertexts.CODE if patch.encrypted else numbers.CODES[values],
        content=CONTENTS.index(content),
        base=OVERS.index(patch.base),
        round=round_,
        sequence=sequence,
        base_sequence=(plan.base_sequence or 0) if patch.base == "previous" else 0,
        kind=kind,
        run=bytes.fromhex(plan.run),
        layout=bytes.fromhex(plan.layout.fingerprint),
        base_mask=bytes.fromhex(plan.base_mask.fingerprint) if encoding.requires_base and plan.base_mask else _NO_MASK,
        scalars=patch.mask.count,
        selection_bytes=len(selection),
        trainable_bytes=len(trained),
    )
    start = header.values_start
    spent = numbers.WIDTH[values] * patch.mask.count if patch.encrypted is None else patch.encrypted.data.numel()
    end = start + spent
    data = np.empty(-(-end // 8) * 8, np.uint8)
    sections = HEADER_BYTES + len(selection)
    data[HEADER_BYTES:sections] = np.frombuffer(selection, np.uint8)
    data[sections : sections + len(trained)] = np.frombuffer(trained, np.uint8)
    data[sections + len(trained) : start] = 0
    data[end:] = 0
    left = residual
    if patch.encrypted is None:
        left = numbers.write(patch, values, residual, data[start:end])
    else:
        data[start:end] = patch.encrypted.data.numpy()
    write_header(header, data)
    floor = spent + min(len(selection), compute_selection_entropy(patch.mask, plan.base_mask))
    if trainable is not None:
        floor += min(len(trained), compute_selection_entropy(trainable, patch.mask))
    return Encoded(data, encoding.name, written, patch.mask.count, len(selection) + len(trained), spent, floor, left)


def min_message_bytes(scalars: int, values: ValueType) -> int:
    """Bytes of a message that carries so many values and need not say where they belong."""
    return HEADER_BYTES + -(-numbers.WIDTH[values] * scalars // 8) * 8


def _question(plan: Plan) -> tuple[int, int, str]:
    """Sequence, round and kind of a sender's plan."""
    if plan.sequence is None or plan.round is None or plan.kind is None or not is_kind(plan.kind):
        raise ValueError(f"a sender's plan needs sequence, round and a kind of 1 to 16 printable ASCII, found {plan}")
    return plan.sequence, plan.round, plan.kind


def _fits(patch: Patch, plan: Plan) -> None:
    """A gather from a source of another size would send other entries than meant."""
    total, shape = plan.layout.size, tuple(patch.source.shape)
    if patch.mask.size != total:
        raise ValueError(f"patch.mask: expected a mask of the layout's {total} entries, found {patch.mask}")
    if shape not in ((patch.mask.count,), (total,)):
        raise ValueError(f"patch.source: expected shape ({patch.mask.count},) or ({total},), found {shape}")
    if patch.base == "previous" and plan.base_sequence is None:
        raise ValueError(
            "plan.base_sequence: a patch over what is held needs the number of the message that the receiver has"
        )


def decode(data: bytes | bytearray | memoryview | np.ndarray, plan: Plan, site: str = "?") -> Decoded:
    """What a message says, after everything in it has been held against the receiver's own plan.

    Nothing is allocated from a number in the message before that number has been checked.

    Args:
        data: the whole message.
        plan: the receiver's.
        site: the sender, as the framework knows it; only for the error.

    Raises:
        RejectedMessage: malformed, damaged, or of another run, model, round or question; the code says which.
        NotHeld: it leans on a mask or a vector that this receiver does not hold.
    """
    try:
        return _decode(_buffer(data, site), plan)
    except WireError as error:
        raise error.with_site(site) from error


def read_sequence(data: bytes | bytearray | memoryview | np.ndarray, site: str = "?") -> int:
    """The number of the question that a message belongs to, before the receiver knows what it holds.

    Raises:
        RejectedMessage: malformed or damaged.
    """
    try:
        return read_header(_buffer(data, site)).sequence
    except WireError as error:
        raise error.with_site(site) from error


def _buffer(data: bytes | bytearray | memoryview | np.ndarray, site: str) -> np.ndarray:
    buffer = data if isinstance(data, np.ndarray) else _bytes(data, site)
    if buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise RejectedMessage("E_DTYPE", "message", "uint8 (n,)", f"{buffer.dtype} {buffer.shape}", site)
    return np.ascontiguousarray(buffer)


def _bytes(data: bytes | bytearray | memoryview, site: str) -> np.ndarray:
    try:
        return np.frombuffer(data, np.uint8)
    except (BufferError, TypeError) as error:
        raise RejectedMessage("E_DTYPE", "message", "contiguous bytes", type(data).__name__, site) from error


def _decode(buffer: np.ndarray, plan: Plan) -> Decoded:
    header = read_header(buffer)
    _belongs(header, plan)
    encoding, kind = _named(header.encoding, CODES, "encoding"), _value_format(header.values, plan)
    content = CONTENTS[_below(header.content, len(CONTENTS), "content")]
    over = OVERS[_below(header.base, len(OVERS), "over")]
    _holds(header, over, encoding, plan)
    if header.scalars > plan.layout.size:
        raise RejectedMessage("E_SIZE", "scalars", f"at most {plan.layout.size}", header.scalars)
    end = header.values_start + _values_bytes(buffer, header, kind, plan)
    if buffer.size != -(-end // 8) * 8:
        raise RejectedMessage("E_LEN", "message", -(-end // 8) * 8, buffer.size)
    cut = HEADER_BYTES + header.selection_bytes
    stop = cut + header.trainable_bytes
    if buffer[stop : header.values_start].any() or buffer[end:].any():
        raise RejectedMessage("E_CANON", "padding", "zero bytes", "others")
    on = encoding.decode(buffer[HEADER_BYTES:cut], plan.base_mask, plan.layout)
    if on.count != header.scalars:
        raise RejectedMessage("E_NNZ", "scalars", f"{on.count} selected entries", header.scalars)
    trainable = _trainable(header, buffer[cut:stop], on, plan.layout)
    raw = buffer[header.values_start : end]
    if kind == "ckks":
        patch = Patch.from_encrypted(EncryptedValues(torch.from_numpy(raw.copy())), on, over)
    else:
        patch = Patch(numbers.read(raw, kind), on, over)
    said = header.selection_bytes + header.trainable_bytes
    return Decoded(
        patch, content, trainable, header.kind, header.round, header.sequence, encoding.name, kind, said, raw.size
    )


def _values_bytes(buffer: np.ndarray, header: Header, kind: ValueFormat, plan: Plan) -> int:
    """Bytes of the values section, from the receiver's own knowledge and lengths that it has checked."""
    if kind != "ckks":
        return numbers.WIDTH[kind] * header.scalars
    assert plan.ciphertext_format is not None
    return ciphertexts.measure_ciphertexts(buffer[header.values_start :], header.scalars, plan.ciphertext_format)


def _belongs(header: Header, plan: Plan) -> None:
    """The message is of this run, model and question."""
    for code, field, expected, found in (
        ("E_LAYOUT", "layout", bytes.fromhex(plan.layout.fingerprint), header.layout),  # a run's name depends on it
        ("E_RUN", "run", bytes.fromhex(plan.run), header.run),
        ("E_KIND", "kind", plan.kind, header.kind),
        ("E_ROUND", "round", plan.round, header.round),
        ("E_REPLAY", "sequence", plan.sequence, header.sequence),
    ):
        if expected is not None and found != expected:
            raise RejectedMessage(code, field, _shown(expected), _shown(found))


def _holds(header: Header, over: Base, encoding: Encoding, plan: Plan) -> None:
    """This receiver holds what the message leans on, and the message names nothing that it does not need."""
    if encoding.requires_base:
        mine = bytes.fromhex(plan.base_mask.fingerprint) if plan.base_mask else None
        if header.base_mask != mine:
            raise MissingBase("E_NOT_HELD", "mask", _shown(mine), _shown(header.base_mask))
    elif header.base_mask != _NO_MASK:
        raise RejectedMessage("E_CANON", "mask fingerprint", "zeros", _shown(header.base_mask))
    if over == "previous":
        if plan.base_sequence is None or header.base_sequence != plan.base_sequence:
            raise MissingBase("E_NOT_HELD", "base", plan.base_sequence, header.base_sequence)
    elif header.base_sequence:
        raise RejectedMessage("E_CANON", "base", 0, header.base_sequence)


def _trainable(header: Header, raw: np.ndarray, on: Mask, layout: Layout) -> Mask | None:
    if header.trainable == 0:
        if raw.size:
            raise RejectedMessage("E_LEN", "trainable", "0 bytes", raw.size)
        return None
    return _named(header.trainable, CODES, "trainable encoding").decode(raw, on, layout)


def _named(code: int, registry: dict[int, Encoding], field: str) -> Encoding:
    if code not in registry:
        raise RejectedMessage("E_VERSION", field, sorted(registry), code)
    return registry[code]


def _value_format(code: int, plan: Plan) -> ValueFormat:
    if code == ciphertexts.CODE and plan.ciphertext_format is not None:
        return "ckks"
    for name, number in numbers.CODES.items():
        if number == code:
            return name
    raise RejectedMessage("E_DTYPE", "values", dict(numbers.CODES), code)


def _below(code: int, limit: int, field: str) -> int:
    if code >= limit:
        raise RejectedMessage("E_VERSION", field, f"0..{limit - 1}", code)
    return code


def _shown(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value
