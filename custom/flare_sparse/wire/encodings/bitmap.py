"""One bit per entry: smaller than int32 indices above about 3 % density."""

import numpy as np
import torch

from ...core.mask import Mask
from ...core.params import Layout
from .bits import pack_bits, unpack_bits
from .encoding import Encoding


class Bitmap(Encoding):
    """Any selection. Used for the one message that announces a mask, and by SCBF at high upload rates."""

    name, code = "bitmap", 4

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 1

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes:
        return pack_bits(mask.bits.numpy())

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        return Mask(torch.from_numpy(unpack_bits(section, layout.size)))
