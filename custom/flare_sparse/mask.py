"""Masks: which entries of a vector live, train or travel. Exact counts, deterministic ties (C3, C4)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .errors import SelectionError
from .params import MASKABLE, Layout, TensorSpec


class Mask:
    """A selection of the P entries of a vector: bool, explicit, never derived from ``w != 0`` (C4).

    Immutable: the tensor given to the constructor must not be written to afterwards. What is asked of it often
    (count, indices, fingerprint) is computed once.

    Attributes:
        bits: bool tensor ``(P,)``.
    """

    def __init__(self, bits: Tensor):
        if bits.dtype != torch.bool or bits.dim() != 1:
            raise SelectionError(f"a mask is a bool tensor of shape (P,), found {bits.dtype} {tuple(bits.shape)}")
        self.bits = bits.contiguous()

    @classmethod
    def full(cls, size: int) -> Mask:
        return cls(torch.ones(size, dtype=torch.bool))

    @classmethod
    def empty(cls, size: int) -> Mask:
        return cls(torch.zeros(size, dtype=torch.bool))

    @classmethod
    def from_tensors(cls, layout: Layout, wanted: Callable[[TensorSpec], bool]) -> Mask:
        """All entries of the tensors that satisfy ``wanted``."""
        return cls(layout.select(wanted))

    @classmethod
    def from_preset(cls, layout: Layout, preset: str) -> Mask:
        """The entries that ``preset`` (a key of ``params.MASKABLE``) allows to be masked (C2)."""
        return cls.from_tensors(layout, lambda entry: entry.role in MASKABLE[preset])

    @property
    def size(self) -> int:
        """P."""
        return self.bits.numel()

    @cached_property
    def count(self) -> int:
        """Number of selected entries."""
        return int(np.count_nonzero(self.bits.numpy()))

    @property
    def is_full(self) -> bool:
        return self.count == self.size

    @cached_property
    def indices(self) -> Tensor:
        """Selected positions, ascending, int64 ``(count,)``."""
        return torch.from_numpy(np.flatnonzero(self.bits.numpy()))

    @cached_property
    def packed(self) -> bytes:
        """One bit per entry, the first entry in the highest bit of the first byte; padding bits are zero."""
        return np.packbits(self.bits.numpy()).tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the selection."""
        return hashlib.sha256(self.size.to_bytes(8, "little") + self.packed).hexdigest()[:32]

    def take(self, vector: Tensor) -> Tensor:
        """The selected values ``(count,)`` of ``vector`` ``(P,)``, in order."""
        if self.is_full:
            return vector
        return torch.from_numpy(vector.detach().numpy().take(self.indices.numpy()))

    def put(self, values: Tensor, into: Tensor) -> Tensor:
        """Write ``values`` ``(count,)`` to the selected positions of ``into`` ``(P,)``, in place; returns ``into``.

        Raises:
            SelectionError: there are more or fewer values than selected positions.
        """
        if values.shape != (self.count,):
            raise SelectionError(f"values: expected shape ({self.count},), found {tuple(values.shape)}")
        if self.is_full:
            return into.copy_(values)
        return into.scatter_(0, self.indices, values.to(into.dtype))

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.bits & other.bits)

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.bits | other.bits)

    def __sub__(self, other: Mask) -> Mask:
        return Mask(self.bits & ~other.bits)

    def __invert__(self) -> Mask:
        return Mask(~self.bits)

    def __le__(self, other: Mask) -> bool:
        """Nested: every entry of this mask is in ``other``."""
        return not bool((self.bits & ~other.bits).any())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mask) and torch.equal(self.bits, other.bits))

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Mask({self.count} of {self.size}, {self.fingerprint[:8]})"


def floor_fraction(fraction: float, total: int) -> int:
    """``floor(fraction * total)``, forgiving the last bit of a decimal fraction: ``share(0.1, 30) == 3``."""
    return int(np.floor(fraction * total + 1e-9))


def top_k(scores: Tensor, k: int, within: Mask | None = None) -> Mask:
    """Exactly the ``k`` largest ``scores`` ``(P,)``, ties to the lowest index, never outside ``within`` (C3).

    Takes O(P): the k-th largest score is found by partition, entries above it are in, and ties fill up from the
    lowest index.

    Raises:
        SelectionError: fewer than ``k`` entries to choose from, or a score that is NaN.
    """
    candidates = within if within is not None else Mask.full(scores.numel())
    if not 0 <= k <= candidates.count:
        raise SelectionError(f"cannot select {k} of {candidates.count} entries; choose 0 to {candidates.count}")
    values = candidates.take(scores.detach()).numpy()
    if np.isnan(values).any():
        raise SelectionError(f"{int(np.isnan(values).sum())} of {values.size} scores are NaN; nothing is selected")
    chosen = np.zeros(values.size, dtype=bool)
    if k:
        threshold = np.partition(values, values.size - k)[values.size - k]
        np.greater(values, threshold, out=chosen)
        ties = np.flatnonzero(values == threshold)
        chosen[ties[: k - int(np.count_nonzero(chosen))]] = True
    on = torch.zeros(candidates.size, dtype=torch.bool)
    on[candidates.indices] = torch.from_numpy(chosen)
    return Mask(on)


def top_k_per_tensor(scores: Tensor, k: int, layout: Layout, within: Mask, at_least: int) -> Mask:
    """As :func:`top_k`, but every tensor that has candidates keeps its ``at_least`` best, so no layer dies.

    Raises:
        SelectionError: ``k`` is too small for ``at_least`` entries of every tensor.
    """
    kept = Mask.empty(layout.size)
    if at_least:
        for entry in layout.tensors:
            candidates = Mask.from_tensors(layout, lambda e, wanted=entry: e is wanted) & within  # type: ignore[misc]
            kept = kept | top_k(scores, min(at_least, candidates.count), candidates)
    if kept.count > k:
        raise SelectionError(f"min_per_layer {at_least} needs {kept.count} live entries, the sparsity leaves {k}")
    return kept | top_k(scores, k - kept.count, within - kept)


def prune_mask(mask: Mask, scores: Tensor, sparsity: float, pool: Mask) -> Mask:
    """Turn off the lowest-scored live entries of ``pool`` until ``floor(sparsity * |pool|)`` of it are off.

    Ties are turned off from the lowest index (FedSparsify's purge). The result is nested in ``mask``: nothing that
    was off comes back, and a pool that is sparse enough stays as it is.
    """
    live = mask & pool
    off = floor_fraction(sparsity, pool.count)
    surplus = live.count - (pool.count - off)
    if surplus <= 0:
        return mask
    return mask - top_k(-scores, surplus, within=live)
