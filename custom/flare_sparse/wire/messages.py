"""Encoded and decoded messages."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..core.exchange import Content, Patch
from ..core.mask import Mask
from .formats import ValueFormat


@dataclass(frozen=True)
class Encoded:
    """A message and its cost in bytes.

    Attributes:
        data: uint8 ``(n,)``, the whole message.
        encoding: name of the selection's encoding.
        values: format of the values.
        scalars: number of values.
        selection_bytes: length of the selection and trainable sections.
        values_bytes: length of the values section.
        floor_bytes: least number of bytes: the values, and the entropy of the selection given the receiver's base.
        residual: ``(P,)`` rounding error of the number format; None for float32 without an earlier residual.
        received: ``(scalars,)`` the values that the receiver reads, if the format rounds; else None.
        base: name of the vector that the message builds on; None: it builds on none.
        request: name of the request that the message is or answers.
    """

    data: np.ndarray
    encoding: str
    values: ValueFormat
    scalars: int
    selection_bytes: int
    values_bytes: int
    floor_bytes: int
    residual: Tensor | None
    received: Tensor | None = None
    base: str | None = None
    request: str = ""

    @property
    def payload_bytes(self) -> int:
        """Length of the whole message."""
        return int(self.data.size)


@dataclass(frozen=True)
class Decoded:
    """The content of a message that passed every check.

    ``trainable`` is None in an update. ``is_difference``: the message has differences, the patch their sums with the
    vector of the receiver.
    """

    patch: Patch
    content: Content
    trainable: Mask | None
    kind: str
    round: int
    sequence: int
    target: str
    request: str
    encoding: str
    values: ValueFormat
    selection_bytes: int
    values_bytes: int
    is_difference: bool = False
