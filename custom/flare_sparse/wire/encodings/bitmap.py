"""Selections that both ends know, and one bit per entry: smaller than int32 indices above about 3 % density."""

import numpy as np
import torch

from ...core.errors import RejectedMessage
from ...core.mask import Mask
from ...core.params import Layout
from .bits import pack_bits, unpack_bits
from .encoding import Encoding


class _Empty(Encoding):
    """An empty section."""

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes:
        return b""

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        if section.size:
            raise RejectedMessage("E_LEN", "selection", "0 bytes", section.size)
        assert base_mask is not None or not self.requires_base, "the decoder checks requires_base"
        return base_mask if self.requires_base and base_mask is not None else Mask.full(layout.size)


class Dense(_Empty):
    """All entries. Used by FedAvg."""

    name, code = "dense", 1

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 0 if mask.is_full else None


class Shared(_Empty):
    """Exactly the base mask. Used by NeuroSFL, and by FedSparsify in rounds without pruning."""

    name, code, requires_base = "shared", 2, True

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 0 if base_mask is not None and mask == base_mask else None


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
