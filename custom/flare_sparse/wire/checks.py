"""Compare patches and message headers with the plan of the end that checks them."""

from __future__ import annotations

from typing import Any, TypeVar

from ..core.errors import MissingBase, RejectedMessage
from ..core.exchange import Base, Patch
from .encodings import Encoding
from .envelope import Header, is_kind
from .formats import FORMAT_CODES, ValueFormat
from .plan import Plan

T = TypeVar("T")

NO_MASK = bytes(16)
"""Mask fingerprint in the header of a message whose encoding refers to no mask."""


def check_sender_plan(plan: Plan) -> None:
    """Raise ValueError unless the plan identifies a request."""
    if plan.sequence is None or plan.round is None or plan.kind is None or not is_kind(plan.kind):
        raise ValueError(
            f"plan: a sender needs sequence, round and a kind of 1 to 16 printable ASCII characters, found {plan}"
        )


def check_patch(patch: Patch, plan: Plan) -> None:
    """Raise ValueError unless the patch fits the plan's layout and base."""
    total, shape = plan.layout.size, tuple(patch.source.shape)
    if patch.mask.size != total:
        raise ValueError(f"patch.mask: expected a mask of the layout's {total} entries, found {patch.mask}")
    # A source of any other size would be gathered without an error and send the wrong entries.
    if shape not in ((patch.mask.count,), (total,)):
        raise ValueError(f"patch.source: expected shape ({patch.mask.count},) or ({total},), found {shape}")
    if patch.base == "previous" and plan.base_sequence is None:
        raise ValueError('plan.base_sequence: base "previous" needs the sequence number of the receiver\'s vector')


def check_identity(header: Header, plan: Plan) -> None:
    """Raise RejectedMessage unless the message is of this run, model and request."""
    for code, field, expected, found in (
        # The layout comes before the run: the run's id depends on it, so another model would always show as E_RUN.
        ("E_LAYOUT", "layout", bytes.fromhex(plan.layout.fingerprint), header.layout),
        ("E_RUN", "run", bytes.fromhex(plan.run), header.run),
        ("E_KIND", "kind", plan.kind, header.kind),
        ("E_ROUND", "round", plan.round, header.round),
        ("E_REPLAY", "sequence", plan.sequence, header.sequence),
    ):
        if expected is not None and found != expected:
            raise RejectedMessage(code, field, _format_field(expected), _format_field(found))


def check_base(header: Header, base: Base, encoding: Encoding, plan: Plan, *, is_difference: bool) -> None:
    """Check that the receiver holds the mask and the vector that the message refers to.

    Raises:
        MissingBase: the receiver does not hold them; the sender can send the full model instead.
        RejectedMessage: the message names a mask or a vector that it does not use.
    """
    if encoding.requires_base:
        fingerprint = bytes.fromhex(plan.base_mask.fingerprint) if plan.base_mask else None
        if header.base_mask != fingerprint:
            expected, found = _format_field(fingerprint), _format_field(header.base_mask)
            raise MissingBase("E_NOT_HELD", "mask", expected, found)
    # An unused field must be zero: a message has one valid form, and no data can be hidden in it.
    elif header.base_mask != NO_MASK:
        raise RejectedMessage("E_CANON", "mask fingerprint", "zeros", _format_field(header.base_mask))
    if base == "previous" or is_difference:
        if is_difference and plan.base_vector is None:
            raise MissingBase("E_NOT_HELD", "base", "a message without differences", header.base_sequence)
        if plan.base_sequence is None or header.base_sequence != plan.base_sequence:
            raise MissingBase("E_NOT_HELD", "base", plan.base_sequence, header.base_sequence)
    elif header.base_sequence:
        raise RejectedMessage("E_CANON", "base", 0, header.base_sequence)


def find_value_format(code: int, plan: Plan) -> ValueFormat:
    """Return the value format that has ``code`` in the header.

    Raises:
        RejectedMessage: there is no such code, or the values are encrypted and this end accepts plain values only.
    """
    # Without the format of its ciphertexts an end can neither bound their length nor read them.
    accepted = {name: own for name, own in FORMAT_CODES.items() if name != "ckks" or plan.ciphertext_format is not None}
    for name, own in accepted.items():
        if own == code:
            return name
    raise RejectedMessage("E_DTYPE", "values", accepted, code)


def find_by_code(table: tuple[T, ...], code: int, field: str) -> T:
    """Return the value that has ``code`` in the header.

    Raises:
        RejectedMessage: there is no such code.
    """
    if code >= len(table):
        raise RejectedMessage("E_VERSION", field, f"0..{len(table) - 1}", code)
    return table[code]


def _format_field(value: Any) -> Any:
    """Return bytes as hex digits for an error text, any other value unchanged."""
    return value.hex() if isinstance(value, bytes) else value
