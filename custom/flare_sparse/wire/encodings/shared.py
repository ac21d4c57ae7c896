"""The mask that both ends hold, named by its fingerprint in the header: 0 bytes a round."""

from __future__ import annotations

import numpy as np

from ...mask import Mask
from ...params import Layout
from .encoding import Encoding, require_length


class Shared(Encoding):
    """Exactly the known mask; serves NeuroSFL and the rounds of FedSparsify between two prunings."""

    name, code, requires_base = "shared", 2, True

    def min_bytes(self, on: Mask, known: Mask | None, layout: Layout) -> int | None:
        return 0 if known is not None and on == known else None

    def encode(self, on: Mask, known: Mask | None, layout: Layout) -> bytes:
        return b""

    def decode(self, raw: np.ndarray, known: Mask | None, layout: Layout) -> Mask:
        require_length(raw, 0)
        assert known is not None, "the codec checks what an encoding leans on"
        return known
