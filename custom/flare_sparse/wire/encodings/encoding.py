"""The interface of an encoding."""

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from ...core.mask import Mask
from ...core.params import Layout


class Encoding(ABC):
    """One way to write which of the P entries of a layout are selected.

    Attributes:
        name: name in the ledger, unique in the package.
        code: code in the header, unique in the package and never reused.
        requires_base: whether the section refers to a mask that the receiver must hold.
    """

    name: ClassVar[str]
    code: ClassVar[int]
    requires_base: ClassVar[bool] = False

    @abstractmethod
    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        """Return a lower bound of the section's length that is cheap to compute.

        0 means that the section is empty. None means that this encoding cannot write this selection.
        """

    @abstractmethod
    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes | None:
        """Return the section, or None if this encoding turns out not to be able to write this selection."""

    @abstractmethod
    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        """Return the selection of a section that is not trusted.

        Args:
            section: uint8 ``(n,)``.
            base_mask: the mask that the receiver holds; not None if ``requires_base``.
            layout: the receiver's own layout.

        Raises:
            RejectedMessage: ``encode`` does not write this section for any selection.
        """
