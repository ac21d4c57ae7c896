"""Compare patches and message headers with the plan of the end that checks them."""

from typing import Any, TypeVar

from ..core.errors import MissingBase, RejectedMessage
from ..core.exchange import Base, Patch
from .encodings import Encoding
from .envelope import Header, is_kind
from .formats import FORMATS, ValueType
from .plan import NO_NAME, Plan

T = TypeVar("T")


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


def find_value_format(code: int) -> ValueType:
    """Return the number format that has ``code`` in the header.

    Raises:
        RejectedMessage: there is no such code.
    """
    for name, row in FORMATS.items():
        if row.code == code:
            return name
    raise RejectedMessage("E_DTYPE", "values", {name: row.code for name, row in FORMATS.items()}, code)


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
