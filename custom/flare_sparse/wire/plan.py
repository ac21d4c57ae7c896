"""What both ends agree on before a message is sent; the receiver checks the message against its own copy."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torch import Tensor

from ..core.mask import Mask
from ..core.params import Layout


@dataclass(frozen=True)
class CiphertextFormat:
    """What an end knows of ciphertexts before it reads one.

    Attributes:
        parameters: 8 bytes that identify the encryption parameters.
        slots: number of values in one ciphertext.
        max_bytes: largest possible length of one ciphertext.
    """

    parameters: bytes
    slots: int
    max_bytes: int

    def count_ciphertexts(self, scalars: int) -> int:
        """Return the number of ciphertexts that carry ``scalars`` values."""
        return -(-scalars // self.slots)


@dataclass(frozen=True)
class Plan:
    """What one end knows about a message before it arrives.

    Attributes:
        layout: layout of the model; each end builds its own.
        run: 16 hex digits that identify the run.
        base_mask: mask that the receiver holds; None: it holds none.
        base_sequence: sequence number of the message that carried the vector of the receiver; None: it has none.
        base_vector: ``(P,)`` that vector, for formats that send weights as differences to it; None: such
            messages cannot be sent or read.
        sequence, round, kind: of the request that the message is or answers. A sender gives all three. A site that
            receives a request does not know them yet and leaves them None; they are then not checked.
        ciphertext_format: format of encrypted values; None: this end accepts no encrypted values.

    Raises:
        ValueError: ``run`` is not 16 hex digits.
    """

    layout: Layout
    run: str
    base_mask: Mask | None = None
    base_sequence: int | None = None
    base_vector: Tensor | None = field(default=None, compare=False, repr=False)
    sequence: int | None = None
    round: int | None = None
    kind: str | None = None
    ciphertext_format: CiphertextFormat | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{16}", self.run):
            raise ValueError(f"run: expected 16 lower-case hex digits, found {self.run!r}")

    @property
    def max_message_bytes(self) -> int:
        """Length that no message of this model exceeds: all values, and two selections in their longest encoding."""
        # The longest encodings take at most 8 bytes for each entry and tensor; the rest is for headers.
        selections = 2 * 8 * (self.layout.size + len(self.layout.tensors) + 1)
        cipher = self.ciphertext_format
        ciphertexts = cipher.count_ciphertexts(self.layout.size) * (cipher.max_bytes + 8) if cipher else 0
        return 4096 + selections + 4 * self.layout.size + ciphertexts
