"""The ledger: one line per message, what was paid beside the dense cost and the floor (C9)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..exchange import Content
from .codec import Decoded, Encoded
from .encoding_choice import compute_selection_entropy
from .plan import Plan


@dataclass(frozen=True)
class LedgerLine:
    """One message.

    ``content`` is what it carries, of a question what it asks for.
    ``dense_bytes`` is what dense FedAvg would have sent in its place: the model as plain float32, or nothing for what
    FedAvg does not say (scores and what asks for them, answers without values). ``floor_bytes`` is what theory asks
    for: the values at their format (encrypted ones: their ciphertexts), and the entropy of the selection given what the
    receiver knows.
    """

    run: str
    round: int
    sequence: int
    site: str
    direction: Literal["down", "up"]
    kind: str
    content: str
    encoding: str
    values: str
    scalars_total: int
    scalars_sent: int
    payload_bytes: int
    selection_bytes: int
    dense_bytes: int
    floor_bytes: int


@dataclass
class Ledger:
    """All messages of a run, in the order in which the server sent or received them."""

    lines: list[LedgerLine] = field(default_factory=list)

    def record_sent(self, message: Encoded, plan: Plan, site: str, asked: Content) -> None:
        """A question that goes to a site and asks for ``asked``."""
        self.lines.append(
            _line(
                plan,
                site,
                "down",
                asked,
                encoding=message.encoding,
                values=message.values,
                scalars_sent=message.scalars,
                payload_bytes=message.payload_bytes,
                selection_bytes=message.selection_bytes,
                floor_bytes=message.floor_bytes,
            )
        )

    def record_received(self, message: Decoded, plan: Plan, site: str, payload_bytes: int) -> None:
        """An answer that passed every check."""
        on = message.patch.mask
        floor = message.values_bytes + min(message.selection_bytes, compute_selection_entropy(on, plan.base_mask))
        self.lines.append(
            _line(
                plan,
                site,
                "up",
                message.content,
                encoding=message.encoding,
                values=message.values,
                scalars_sent=on.count,
                payload_bytes=payload_bytes,
                selection_bytes=message.selection_bytes,
                floor_bytes=floor,
            )
        )


def _line(plan: Plan, site: str, direction: Literal["down", "up"], content: Content, **paid: Any) -> LedgerLine:
    """A message of a plan; FedAvg has none that ask for scores, bring scores or bring nothing."""
    total = plan.layout.size
    return LedgerLine(
        run=plan.run,
        round=plan.round or 0,
        sequence=plan.sequence or 0,
        site=site,
        direction=direction,
        kind=plan.kind or "",
        content=content,
        scalars_total=total,
        dense_bytes=0 if content in ("scores", "metrics") else 4 * total,
        **paid,
    )
