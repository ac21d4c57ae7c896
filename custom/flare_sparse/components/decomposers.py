"""Masks and patches in any Shareable.

``recipe.add_decomposers(["flare_sparse.components.decomposers.MaskDecomposer"])`` registers one at all ends. FLARE's
serializer (FOBS) asks it to take an object apart, and its twin at the other end to build it.
"""

from typing import Any

import numpy as np
import torch
from nvflare.fuel.utils import fobs

from ..core.exchange import Patch
from ..core.mask import Mask
from .arrays import ComponentError


class MaskDecomposer(fobs.Decomposer):
    """Takes a :class:`Mask` apart, one bit per entry."""

    def supported_type(self) -> type[Mask]:
        return Mask

    def decompose(self, target: Mask, manager: Any = None) -> Any:
        return [target.size, target.packed]

    def recompose(self, data: Any, manager: Any = None) -> Mask:
        """Return the mask.

        Raises:
            ComponentError: the data are no mask.
        """
        try:
            size, packed = data
            if type(size) is not int or not isinstance(packed, bytes):
                raise TypeError("types")
            return Mask.from_packed(np.frombuffer(packed, np.uint8), size)
        except (TypeError, ValueError) as error:
            raise ComponentError(self, "the data are no size and packed bits", "send a Mask of this package") from error


class PatchDecomposer(fobs.Decomposer):
    """Takes a :class:`Patch` apart: its mask, its float32 values, its base."""

    def supported_type(self) -> type[Patch]:
        return Patch

    def decompose(self, target: Patch, manager: Any = None) -> Any:
        values = target.values.detach().cpu().contiguous().numpy().astype("<f4", copy=False)
        return [target.mask.size, target.mask.packed, values.tobytes(), target.base]

    def recompose(self, data: Any, manager: Any = None) -> Patch:
        """Return the patch.

        Raises:
            ComponentError: the data are no patch.
        """
        try:
            size, packed, values, base = data
            mask = MaskDecomposer().recompose([size, packed])
            if len(values) != 4 * mask.count or base not in ("zeros", "previous"):
                raise ValueError("values")
            return Patch(torch.from_numpy(np.frombuffer(values, "<f4").copy()), mask, base)
        except (TypeError, ValueError) as error:
            raise ComponentError(
                self, "the data are no mask, values and base", "send a Patch of this package"
            ) from error
