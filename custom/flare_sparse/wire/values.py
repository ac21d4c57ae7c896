"""Values in plain formats: one flat little-endian buffer, in float32 or rounded with error feedback, or compressed."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.params import Layout
from .number_format import CodedValues, Coding, NumberFormat, add_residual, is_finite, require_finite
from .shuffled import LENGTH_BYTES, measure_shuffled, pack_shuffled, unpack_shuffled

_INTEGERS = {1: torch.int8, 2: torch.int16}
"""Type of the bits of a rounded value, by its bytes."""


@dataclass(frozen=True, kw_only=True)
class Plain(NumberFormat):
    """Values rounded to a type ``dtype``, one after the other."""

    dtype: torch.dtype

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", self.dtype.itemsize)

    def compute_min_bytes(self, scalars: int) -> int:
        return self.dtype.itemsize * scalars

    def measure(self, buffer: np.ndarray, scalars: int, layout: Layout) -> int:
        return self.dtype.itemsize * scalars

    def seal(self, patch: Patch, coding: Coding, out: np.ndarray | None = None) -> CodedValues:
        """Return the section; the residual of float32, which does not round, stays."""
        if out is None:
            out = np.empty(self.dtype.itemsize * patch.mask.count, np.uint8)
        if self.dtype == torch.float32:
            target, source = out.view("<f4"), patch.source.detach()
            if source.numel() == target.size or source.device.type != "cpu":
                np.copyto(target, patch.values.detach().cpu().numpy())
            else:
                # mode="clip" skips numpy's bounds check: indices of a mask are in range.
                np.take(source.numpy(), patch.mask.indices.numpy(), out=target, mode="clip")
            require_finite(torch.from_numpy(target), "values")
            return CodedValues(out, coding.residual)
        # Error feedback: without it, an update below half a unit in the last place would be rounded away in every round
        # and never reach the receiver. The residual carries it over until it is large enough to be represented.
        new_residual, exact = add_residual(patch, coding.residual)
        rounded = exact.to(self.dtype)
        widened = rounded.float()
        require_finite(widened, f"values as {str(self.dtype).removeprefix('torch.')}")
        # numpy has no bfloat16: the bits travel as integers, in the byte order that "<i" fixes.
        integers = rounded.contiguous().view(_INTEGERS[self.dtype.itemsize]).cpu().numpy()
        np.copyto(out.view(f"<i{self.dtype.itemsize}"), integers)
        return CodedValues(out, patch.mask.put(exact - widened, new_residual), widened)

    def open(self, section: np.ndarray, mask: Mask, layout: Layout, base_vector: Tensor | None) -> Tensor:
        """Return the values; a float32 section that is aligned and writeable is not copied."""
        if self.dtype == torch.float32:
            values = torch.from_numpy(np.require(section.view("<f4"), requirements=["ALIGNED", "WRITEABLE"]))
        else:
            integers = section.view(f"<i{self.dtype.itemsize}").copy()
            values = torch.from_numpy(integers).view(self.dtype).float()
        require_finite(values, "values")
        return values

    def can_hold(self, values: Tensor) -> bool:
        return is_finite(values.to(self.dtype).float())


@dataclass(frozen=True, kw_only=True)
class Compressed(Plain):
    """The same bytes, compressed without loss."""

    def __post_init__(self) -> None:
        """The length of the section depends on the values."""

    def compute_min_bytes(self, scalars: int) -> int:
        return LENGTH_BYTES * self.dtype.itemsize

    def measure(self, buffer: np.ndarray, scalars: int, layout: Layout) -> int:
        return measure_shuffled(buffer, scalars, self.dtype.itemsize)

    def seal(self, patch: Patch, coding: Coding, out: np.ndarray | None = None) -> CodedValues:
        plain = super().seal(patch, coding)
        return CodedValues(pack_shuffled(plain.section, self.dtype.itemsize), plain.residual, plain.received)

    def open(self, section: np.ndarray, mask: Mask, layout: Layout, base_vector: Tensor | None) -> Tensor:
        return super().open(unpack_shuffled(section, mask.count, self.dtype.itemsize), mask, layout, base_vector)
