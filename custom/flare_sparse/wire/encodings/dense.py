"""All entries, in an empty section."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...core.mask import Mask
from ...core.params import Layout
from .encoding import Encoding, require_length


@lru_cache(maxsize=2)
def _get_full_mask(size: int) -> Mask:
    """Return the full mask; cached, because a mask computes its indices and fingerprint once and keeps them."""
    return Mask.full(size)


class Dense(Encoding):
    """All entries. Used by FedAvg."""

    name, code = "dense", 1

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 0 if mask.is_full else None

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes:
        return b""

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        require_length(section, 0)
        return _get_full_mask(layout.size)
