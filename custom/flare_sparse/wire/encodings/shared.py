"""The mask that both ends hold, identified by its fingerprint in the header: an empty section."""

import numpy as np

from ...core.mask import Mask
from ...core.params import Layout
from .encoding import Encoding, require_empty


class Shared(Encoding):
    """Exactly the base mask. Used by NeuroSFL, and by FedSparsify in rounds without pruning."""

    name, code, requires_base = "shared", 2, True

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 0 if base_mask is not None and mask == base_mask else None

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes:
        return b""

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        require_empty(section)
        assert base_mask is not None, "the decoder checks requires_base"
        return base_mask
