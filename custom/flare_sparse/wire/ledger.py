"""The ledger: one line per message with the bytes sent, next to the dense cost and the floor."""

from dataclasses import dataclass, field, fields
from typing import Literal

from ..core.exchange import Content
from .codec import Cost, Decoded
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
        encoding, values, scalars_sent, payload_bytes, selection_bytes, floor_bytes: as of :class:`.codec.Cost`.
        scalars_total: number of entries of the model, P.
        dense_bytes: bytes of the message that dense FedAvg would send instead, the model as plain float32; 0 for
            messages that FedAvg does not have (scores, requests for scores, updates without values).
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

    def record_received(self, message: Decoded, plan: Plan, site: str, payload_bytes: int) -> None:
        """Record an update that passed every check."""
        # Counted on the decoded message and not reported by the sender, which could understate its traffic.
        mask = message.patch.mask
        cost = Cost(
            encoding=message.encoding,
            values=message.values,
            scalars_sent=mask.count,
            payload_bytes=payload_bytes,
            selection_bytes=message.header.selection_bytes,
            floor_bytes=message.values_bytes
            + min(message.header.selection_bytes, compute_selection_entropy(mask, plan.base_mask)),
        )
        self.record(plan, site, "up", message.content, cost)

    def record(self, plan: Plan, site: str, direction: Literal["down", "up"], content: Content, cost: Cost) -> None:
        """Add the line of a message: an update, or a request that asks for one with ``content``."""
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
            **{own.name: getattr(cost, own.name) for own in fields(Cost)},
        )
        self.lines.append(line)
