"""One bit per entry, of the model or of the base mask: smaller than int32 indices above about 3 % density."""

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


class Shrink(Encoding):
    """A mask nested in the base mask. Used for FedSparsify's next mask and for pruned neurons."""

    name, code, requires_base = "shrink", 3, True

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 1 if base_mask is not None and mask <= base_mask else None

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes:
        assert base_mask is not None, "compute_min_bytes() is None without a base mask"
        return pack_bits(base_mask.take(mask.bits).numpy())

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        assert base_mask is not None, "the decoder checks requires_base"
        bits = torch.from_numpy(unpack_bits(section, base_mask.count))
        return Mask(base_mask.put(bits, torch.zeros(base_mask.size, dtype=torch.bool)))
