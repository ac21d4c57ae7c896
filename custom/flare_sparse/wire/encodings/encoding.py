"""What an encoding of selections is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from ...errors import RejectedMessage
from ...mask import Mask
from ...params import Layout


class Encoding(ABC):
    """One way to say which of the P entries of a layout are meant.

    Attributes:
        name: as in the ledger.
        code: as in the header, for ever.
        requires_base: it speaks of a mask that the receiver must hold.
    """

    name: ClassVar[str]
    code: ClassVar[int]
    requires_base: ClassVar[bool] = False

    @abstractmethod
    def min_bytes(self, on: Mask, known: Mask | None, layout: Layout) -> int | None:
        """A cheap lower bound of the bytes it takes; None where it cannot say this selection."""

    @abstractmethod
    def encode(self, on: Mask, known: Mask | None, layout: Layout) -> bytes | None:
        """The selection as bytes; None where it cannot be said after all."""

    @abstractmethod
    def decode(self, raw: np.ndarray, known: Mask | None, layout: Layout) -> Mask:
        """The selection back from bytes that are not trusted.

        Args:
            raw: uint8 ``(n,)``.
            known: the receiver's own mask; given where the encoding leans on one.
            layout: the receiver's own.

        Raises:
            RejectedMessage: the bytes are not what ``write`` makes of any selection.
        """


def require_length(raw: np.ndarray, expected: int) -> None:
    """Raises RejectedMessage unless there are exactly ``expected`` bytes."""
    if raw.size != expected:
        raise RejectedMessage("E_LEN", "selection", f"{expected} bytes", raw.size)
