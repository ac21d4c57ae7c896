"""Selections that both ends know: all entries, or the mask that both ends hold, which the header names."""

import numpy as np

from ...core.errors import RejectedMessage
from ...core.mask import Mask
from ...core.params import Layout
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
