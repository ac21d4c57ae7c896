"""The ledger: one line per message with the bytes sent, next to the dense cost and the floor."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.exchange import Content
from .codec import Decoded, Encoded
from .encodings import compute_selection_entropy
from .plan import Plan


@dataclass(frozen=True)
class LedgerLine:
    """One message.

    Attributes:
        run: 16 hex digits that identify the run.
        round, sequence, kind: of the request that the message is or answers.
        site: the site's name as FLARE authenticated it.
        direction: "down" from the server to the site, "up" from the site to the server.
        content: content of the update, or the content that the request asks for.
        encoding: name of the selection's encoding.
        values: format of the values.
        scalars_total: number of entries of the model, P.
        scalars_sent: number of values in the message.
        payload_bytes: length of the whole message; FLARE's frames, TLS and polling are not part of it.
        selection_bytes: length of the selection and trainable sections.
        dense_bytes: bytes of the message that dense FedAvg would send instead, the model as plain float32; 0 for
            messages that FedAvg does not have (scores, requests for scores, updates without values).
        floor_bytes: least number of bytes: the values in their format, and the entropy of the selection given the
            receiver's base.
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

    def record_sent(self, message: Encoded, plan: Plan, site: str, expected_content: Content) -> None:
        """Record a request to ``site`` that asks for an update with ``expected_content``."""
        self.record(
            plan,
            site,
            "down",
            expected_content,
            encoding=message.encoding,
            values=message.values,
            scalars_sent=message.scalars,
            payload_bytes=message.payload_bytes,
            selection_bytes=message.selection_bytes,
            floor_bytes=message.floor_bytes,
        )

    def record_received(self, message: Decoded, plan: Plan, site: str, payload_bytes: int) -> None:
        """Record an update that passed every check."""
        # Counted on the decoded message and not reported by the sender, which could understate its traffic.
        mask = message.patch.mask
        self.record(
            plan,
            site,
            "up",
            message.content,
            encoding=message.encoding,
            values=message.values,
            scalars_sent=mask.count,
            payload_bytes=payload_bytes,
            selection_bytes=message.header.selection_bytes,
            floor_bytes=message.values_bytes
            + min(message.header.selection_bytes, compute_selection_entropy(mask, plan.base_mask)),
        )

    def record(self, plan: Plan, site: str, direction: Literal["down", "up"], content: Content, **cost: Any) -> None:
        """Add the line of a message; ``cost`` has the fields of :class:`LedgerLine` that no plan knows."""
        total = plan.layout.size
        # FedAvg has no messages with scores and none without values.
        dense_bytes = 0 if content in ("scores", "metrics", "statistics") else 4 * total
        line = LedgerLine(
            run=plan.run,
            round=plan.round or 0,
            sequence=plan.sequence or 0,
            kind=plan.kind or "",
            site=site,
            direction=direction,
            content=content,
            scalars_total=total,
            dense_bytes=dense_bytes,
            **cost,
        )
        self.lines.append(line)
