"""One bit per entry; cheaper than int32 indices above about 3 % density."""

from __future__ import annotations

import numpy as np
import torch

from ...mask import Mask
from ...params import Layout
from .bits import pack, unpack
from .encoding import Encoding


class Bitmap(Encoding):
    """Any selection; serves a mask's one message and SCBF at high rates."""

    name, code = "bitmap", 4

    def min_bytes(self, on: Mask, known: Mask | None, layout: Layout) -> int | None:
        return 1

    def encode(self, on: Mask, known: Mask | None, layout: Layout) -> bytes:
        return pack(on.bits.numpy())

    def decode(self, raw: np.ndarray, known: Mask | None, layout: Layout) -> Mask:
        return Mask(torch.from_numpy(unpack(raw, layout.size)))
