"""A number format: the stage of a message that writes values as bytes, and reads them again.

One from another distribution, an instance of a subclass, is an entry point ``flare_sparse.formats`` by the name that
``wire.values`` has (docs/wire-format.md).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.errors import RejectedMessage
from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.needs import Need
from ..core.params import Layout


@dataclass(frozen=True)
class Coding:
    """What a sender codes values with.

    Attributes:
        layout: layout of the model.
        residual: ``(P,)`` what earlier messages lost to rounding; None: nothing.
        base_vector: ``(P,)`` the receiver's vector, to which weights are sent as differences; None: as they are.
        generator: source of rounding at random, in the same state for every attempt at a request.
    """

    layout: Layout
    residual: Tensor | None = None
    base_vector: Tensor | None = None
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class CodedValues:
    """A values section.

    Attributes:
        section: uint8 ``(n,)``.
        residual: ``(P,)`` what the message loses to rounding, with what earlier ones lost elsewhere; None: nothing.
        received: ``(k,)`` the values that the receiver reads, if the format rounds; else None.
    """

    section: np.ndarray
    residual: Tensor | None
    received: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class NumberFormat(ABC):
    """How values are written, and what that asks of the other parts of a job.

    Attributes:
        code: its number in the header, never reused; 128 to 255 for formats of other distributions.
        rounding: largest change of a model's value by rounding, relative to the largest value of its tensor.
        sends_differences: whether weights are sent as differences to the vector that the receiver holds.
        width: bytes of a value, if all have as many; 0: the section is as long as :meth:`seal` makes it.
        takes: the need that a job with it cannot meet; None: it takes none away.
        needs: what it needs itself.
    """

    code: int
    rounding: float = 0.0
    sends_differences: bool = False
    width: int = 0
    takes: Need | None = None
    needs: frozenset[Need] = frozenset({Need.OWN_FORMAT})

    @abstractmethod
    def compute_min_bytes(self, scalars: int) -> int:
        """Return the length of the shortest section with so many values; the values may make it longer."""

    def measure(self, buffer: np.ndarray, scalars: int, layout: Layout) -> int:
        """Return the length in bytes of the section at the start of ``buffer``, uint8, which may be longer.

        By default every section of so many values has the length of the shortest.

        Raises:
            RejectedMessage: the buffer is too short for the section's own length, or that is larger than possible.
        """
        return self.compute_min_bytes(scalars)

    @abstractmethod
    def seal(self, patch: Patch, coding: Coding, out: np.ndarray | None = None) -> CodedValues:
        """Return the section of a patch; its bytes are a function of the arguments.

        Args:
            patch: the values; its source may be strided.
            coding: what they are coded with.
            out: uint8 ``(k * width,)``, which the section is written to, if the format has a width.

        Raises:
            RejectedMessage: a value is not finite in this format; the message must not be sent.
        """

    @abstractmethod
    def open(self, section: np.ndarray, mask: Mask, layout: Layout, base_vector: Tensor | None) -> Tensor:
        """Return the values, float32 ``(k,)``, of a section whose length :meth:`measure` has checked.

        Args:
            section: uint8 ``(n,)``, not trusted.
            mask: entries of the values.
            layout: the receiver's own layout.
            base_vector: as :attr:`Coding.base_vector`.

        Raises:
            RejectedMessage: a value is not finite, or the section is not one that a sender writes.
        """

    def can_hold(self, values: Tensor) -> bool:
        """Whether every value is finite in this format."""
        return is_finite(values)


def take_reference(mask: Mask, base_vector: Tensor | None, device: torch.device | None = None) -> Tensor:
    """Return what differences are added to, float32 ``(k,)`` on a device or the CPU, which may be overwritten."""
    if base_vector is None:
        return torch.zeros(mask.count, device=device)
    reference = mask.take(base_vector).detach()
    moved = reference if device is None else reference.to(device)
    return moved.clone() if moved.data_ptr() == base_vector.data_ptr() else moved


def add_residual(patch: Patch, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a vector ``(P,)`` for the next residual, which holds the last one, and the values with it ``(k,)``.

    Both are where the values of the patch are.
    """
    values = patch.values.detach()
    if residual is not None:
        # A residual out of a checkpoint is on the CPU.
        kept = residual.to(values.device, copy=True)
        return kept, values + patch.mask.take(kept)
    if values.device.type != "cpu":
        # Adding 0.0 copies the values, and turns -0.0 into 0.0 as adding a residual does.
        return torch.zeros(patch.mask.size, device=values.device), values + 0.0
    # torch would write every entry; numpy takes memory that the system clears where it is first written.
    return torch.from_numpy(np.zeros(patch.mask.size, np.float32)), values + 0.0


def require_finite(values: Tensor, field: str) -> None:
    """Raise RejectedMessage unless every value of float32 ``(k,)`` is finite."""
    if not is_finite(values):
        count = int((~values.isfinite()).sum())
        raise RejectedMessage("E_FINITE", field, "finite numbers", f"{count} NaN or infinite")


def is_finite(values: Tensor) -> bool:
    """Return whether every value of float32 ``(k,)`` is finite."""
    # One dot product is several times faster than a test of each value. A finite sum of squares proves that all values
    # are finite; large finite values may overflow it, so only then is each one tested.
    flat = values.detach()
    return math.isfinite(float(torch.dot(flat, flat))) or bool(flat.isfinite().all())
