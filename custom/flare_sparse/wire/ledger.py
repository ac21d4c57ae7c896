"""The ledger: one line per message, what was paid beside the dense cost and the floor (C9)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .choice import selection_entropy
from .codec import Decoded, Encoded
from .plan import Plan
from .values import WIDTH


@dataclass(frozen=True)
class Line:
    """One message.

    ``dense_bytes`` is what dense FedAvg would have sent in its place: the model as plain float32, or nothing for what
    FedAvg does not say (scores before the first round, answers without values). ``floor_bytes`` is what theory asks
    for: the values at their format, and the entropy of the selection given what the receiver knows.
    """

    run: str
    round: int
    sequence: int
    site: str
    direction: Literal["down", "up"]
    kind: str
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

    lines: list[Line] = field(default_factory=list)

    def sent(self, message: Encoded, plan: Plan, site: str) -> None:
        """A question that goes to a site."""
        self._add(
            plan,
            site,
            "down",
            message.encoding,
            message.values,
            message.scalars,
            message.payload_bytes,
            message.selection_bytes,
            message.floor_bytes,
            dense=plan.round != 0,
        )

    def received(self, message: Decoded, plan: Plan, site: str, payload_bytes: int) -> None:
        """An answer that passed every check."""
        on = message.patch.on
        floor = WIDTH[message.values] * on.count + min(message.selection_bytes, selection_entropy(on, plan.known))
        self._add(
            plan,
            site,
            "up",
            message.encoding,
            message.values,
            on.count,
            payload_bytes,
            message.selection_bytes,
            floor,
            dense=plan.round != 0 and message.content != "nothing",
        )

    def _add(
        self,
        plan: Plan,
        site: str,
        direction: Literal["down", "up"],
        encoding: str,
        values: str,
        scalars: int,
        payload: int,
        selection: int,
        floor: int,
        *,
        dense: bool,
    ) -> None:
        total = plan.layout.size
        self.lines.append(
            Line(
                plan.run,
                plan.round or 0,
                plan.sequence or 0,
                site,
                direction,
                plan.kind or "",
                encoding,
                values,
                total,
                scalars,
                payload,
                selection,
                4 * total if dense else 0,
                floor,
            )
        )
