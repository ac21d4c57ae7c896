"""All entries, in an empty section."""

import numpy as np

from ...core.mask import Mask
from ...core.params import Layout
from .encoding import Encoding, require_empty


class Dense(Encoding):
    """All entries. Used by FedAvg."""

    name, code = "dense", 1

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 0 if mask.is_full else None

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes:
        return b""

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        require_empty(section)
        return Mask.full(layout.size)
