"""One bit per entry of the known mask; the new mask is nested in it."""

from __future__ import annotations

import numpy as np
import torch

from ...mask import Mask
from ...params import Layout
from .bits import pack, unpack
from .encoding import Encoding


class Shrink(Encoding):
    """A mask within the known one; serves FedSparsify's next mask and pruned neurons."""

    name, code, requires_base = "shrink", 3, True

    def min_bytes(self, on: Mask, known: Mask | None, layout: Layout) -> int | None:
        return 1 if known is not None and on <= known else None

    def encode(self, on: Mask, known: Mask | None, layout: Layout) -> bytes:
        assert known is not None, "least() said so"
        return pack(known.take(on.bits).numpy())

    def decode(self, raw: np.ndarray, known: Mask | None, layout: Layout) -> Mask:
        assert known is not None, "the codec checks what an encoding leans on"
        bits = torch.from_numpy(unpack(raw, known.count))
        return Mask(known.put(bits, torch.zeros(known.size, dtype=torch.bool)))
