"""What both ends agree on before a message travels; the receiver checks the message against its own copy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ..mask import Mask
from ..params import Layout

ValueType = Literal["float32", "float16", "bfloat16"]
ValueFormat = ValueType | Literal["ckks"]
"""How values stand in a message: as numbers, or encrypted."""


@dataclass(frozen=True)
class CiphertextFormat:
    """What an end knows of ciphertexts before it looks into one.

    Attributes:
        parameters: 8 bytes that name the parameters of the scheme.
        slots: values that one ciphertext holds.
        most_bytes: that one ciphertext can have.
    """

    parameters: bytes
    slots: int
    most_bytes: int

    def ciphertexts(self, scalars: int) -> int:
        """How many carry so many values."""
        return -(-scalars // self.slots)


@dataclass(frozen=True)
class Plan:
    """One end's knowledge of a message.

    Attributes:
        layout: of the model; both ends build it themselves.
        run: 16 hex digits that name the run.
        known: a selection that the receiver holds; None: it holds nothing.
        base: sequence number of the message that gave the receiver the vector it holds.
        sequence, round, kind: of the question. A sender gives all three; a site that is being asked does not know
            them yet and leaves them None: they are not checked then.
        ciphertext_format: of encrypted values; None: this end takes none.

    Raises:
        ValueError: ``run`` is not 16 hex digits.
    """

    layout: Layout
    run: str
    base_mask: Mask | None = None
    base_sequence: int | None = None
    sequence: int | None = None
    round: int | None = None
    kind: str | None = None
    ciphertext_format: CiphertextFormat | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{16}", self.run):
            raise ValueError(f"run: expected 16 lower-case hex digits, found {self.run!r}")
