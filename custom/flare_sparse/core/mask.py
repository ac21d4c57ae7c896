"""Masks: selections of the entries of a vector, with exact counts and deterministic ties."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from .errors import SelectionError, UndefinedScores
from .params import MASKABLE, Layout, TensorSpec


class Mask:
    """A selection of the P entries of a vector.

    A mask is explicit and never derived from ``w != 0``: a live weight may be exactly zero, and treating it as pruned
    would change the selection.

    Masks are immutable: the tensor given to the constructor must not be written to afterwards, because count, indices
    and fingerprint are cached. The bits are on the CPU, which names and encodes a mask; vectors that it selects from
    may be on any device, where its indices then are, too.

    Attributes:
        bits: bool tensor ``(P,)``.

    Examples:
        >>> mask = Mask(torch.tensor([True, False, True]))
        >>> mask.count, mask.take(torch.tensor([5.0, 6.0, 7.0]))
        (2, tensor([5., 7.]))
    """

    def __init__(self, bits: Tensor):
        if bits.dtype != torch.bool or bits.dim() != 1:
            raise SelectionError(f"a mask is a bool tensor of shape (P,), found {bits.dtype} {tuple(bits.shape)}")
        self.bits = bits.contiguous()
        self._indices_elsewhere: dict[torch.device, Tensor] = {}

    @classmethod
    def full(cls, size: int) -> Mask:
        """Return the mask that selects all of ``size`` entries."""
        return _get_full_mask(size)

    @classmethod
    def empty(cls, size: int) -> Mask:
        """Return the mask that selects none of ``size`` entries."""
        # torch would write every entry; numpy takes memory that the system clears where it is first written.
        return cls.from_indices(torch.from_numpy(np.zeros(size, dtype=bool)), torch.zeros(0, dtype=torch.int64))

    @classmethod
    def from_packed(cls, packed: np.ndarray, size: int) -> Mask:
        """Return the mask of ``size`` entries with these :attr:`packed` bytes.

        Raises:
            ValueError: the number of bytes is not that of ``size`` bits.
        """
        if packed.size != (size + 7) // 8:
            raise ValueError(f"{packed.size} bytes for {size} bits")
        return cls(torch.from_numpy(np.unpackbits(packed, count=size).view(bool)))

    @classmethod
    def from_indices(cls, bits: Tensor, indices: Tensor) -> Mask:
        """Return the mask of ``bits`` ``(P,)``, whose selected positions, ascending, are known: int64 ``(count,)``."""
        mask = cls(bits)
        mask.indices, mask.count = indices, indices.numel()
        return mask

    @classmethod
    def from_positions(cls, positions: Tensor, size: int) -> Mask:
        """Return the mask of the positions, ascending, int64 ``(count,)``, of ``size``; they may be on any device."""
        indices, bits = positions.cpu(), torch.zeros(size, dtype=torch.bool)
        bits[indices] = True
        mask = cls.from_indices(bits, indices)
        mask._indices_elsewhere[positions.device] = positions
        return mask

    @classmethod
    def from_tensors(cls, layout: Layout, predicate: Callable[[TensorSpec], bool]) -> Mask:
        """Select all entries of the tensors that satisfy ``predicate``."""
        return cls(layout.select(predicate))

    @classmethod
    def from_preset(cls, layout: Layout, preset: str) -> Mask:
        """Select the maskable entries of ``preset``, a key of ``params.MASKABLE``."""
        return cls.from_tensors(layout, lambda spec: spec.role in MASKABLE[preset])

    def find_buffers(self, layout: Layout) -> Tensor:
        """Return which of the selected entries are those of buffers, bool ``(k,)``."""
        if all(tensor.role != "buffer" for tensor in layout.tensors):
            return torch.zeros(self.count, dtype=torch.bool)
        return self.take(layout.select(lambda tensor: tensor.role == "buffer"))

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
        """Whether every entry is selected."""
        return self.count == self.size

    @cached_property
    def indices(self) -> Tensor:
        """Selected positions, ascending, int64 ``(count,)``."""
        return torch.from_numpy(np.flatnonzero(self.bits.numpy()))

    def find_indices(self, device: torch.device) -> Tensor:
        """Return :attr:`indices` on a device, to which they are copied once."""
        if device == self.bits.device:
            return self.indices
        if device not in self._indices_elsewhere:
            self._indices_elsewhere[device] = self.indices.to(device)
        return self._indices_elsewhere[device]

    @cached_property
    def packed(self) -> bytes:
        """One bit per entry, the first entry in the most significant bit of the first byte; padding bits are zero."""
        return np.packbits(self.bits.numpy()).tobytes()

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the selection."""
        return hashlib.sha256(self.size.to_bytes(8, "little") + self.packed).hexdigest()[:32]

    def take(self, vector: Tensor) -> Tensor:
        """Return the selected values ``(count,)`` of ``vector`` ``(P,)``, in order; ``vector`` itself if all are."""
        if self.is_full:
            return vector
        return vector.detach().index_select(0, self.find_indices(vector.device))

    def put(self, values: Tensor, into: Tensor) -> Tensor:
        """Write ``values`` ``(count,)`` to the selected positions of ``into`` ``(P,)`` in place; return ``into``.

        They may be on different devices: the values alone are copied to the other one.

        Raises:
            SelectionError: the number of values differs from the number of selected positions.
        """
        if values.shape != (self.count,):
            raise SelectionError(f"values: expected shape ({self.count},), found {tuple(values.shape)}")
        if self.is_full:
            return into.copy_(values)
        return into.scatter_(0, self.find_indices(into.device), values.to(into))

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.bits & other.bits)

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.bits | other.bits)

    def __sub__(self, other: Mask) -> Mask:
        return Mask(self.bits & ~other.bits)

    def __invert__(self) -> Mask:
        return Mask(~self.bits)

    def __le__(self, other: Mask) -> bool:
        """Return whether this mask is nested in ``other``: every entry that it selects is selected there."""
        # The counts are cached; they decide most comparisons without a pass over the bits.
        if self is other or other.is_full or not self.count:
            return True
        return self.count <= other.count and not bool((self.bits & ~other.bits).any())

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Mask) and torch.equal(self.bits, other.bits))

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Mask({self.count} of {self.size}, {self.fingerprint[:8]})"


def floor_fraction(fraction: float, total: int) -> int:
    """Return ``floor(fraction * total)`` of the number that is meant by a float, for every ``total``.

    >>> floor_fraction(0.7, 10), floor_fraction(0.29, 100), floor_fraction(1 - 0.9, 10**9)
    (7, 29, 100000000)
    """
    exact, error = _read_fraction(fraction)
    return math.floor((exact + error) * total)


def ceil_fraction(fraction: float, total: int) -> int:
    """Return ``ceil(fraction * total)`` of the number that is meant by a float, for every ``total``.

    >>> ceil_fraction(0.07, 100), ceil_fraction(0.071, 100)
    (7, 8)
    """
    exact, error = _read_fraction(fraction)
    return math.ceil((exact - error) * total)


def _read_fraction(fraction: float) -> tuple[Fraction, Fraction]:
    """Return the number that a float between 0 and 1 stands for, and a bound of its error.

    A float within rounding of a decimal number of at most 12 digits, such as 0.29 or ``1 - 0.9``, stands for that
    number. Any other float, such as a step of a schedule, is itself the result of rounded operations.
    """
    # In float64, 0.29 * 100 is 28.999999999999996, whose floor would select one entry too few. A fixed tolerance on
    # the product would be too small for a large total and, for a small one, larger than the rounding.
    rounding = Fraction(1, 2**52)
    decimal = Fraction(f"{fraction:.12f}")
    if abs(decimal - Fraction(fraction)) <= rounding:
        return decimal, Fraction(0)
    return Fraction(fraction), rounding


def top_k(scores: Tensor, k: int, within: Mask | None = None) -> Mask:
    """Select exactly the ``k`` largest of ``scores`` ``(P,)``, ties to the lowest index.

    Takes O(P) time (docs/algorithms.md, section 1.4). The scores stay where they are; the positions are copied.

    Args:
        scores: ``(P,)``.
        k: number of entries to select.
        within: candidates; None for all entries.

    Raises:
        SelectionError: there are fewer than ``k`` candidates.
        UndefinedScores: a candidate's score is NaN.
    """
    return Mask.from_positions(find_top_k(scores, k, within), scores.numel())


def find_top_k(scores: Tensor, k: int, within: Mask | None = None) -> Tensor:
    """Return the positions that :func:`top_k` selects, ascending, int64 ``(k,)``, where the scores are."""
    candidates = within if within is not None else Mask.full(scores.numel())
    if not 0 <= k <= candidates.count:
        raise SelectionError(f"cannot select {k} of {candidates.count} entries; choose 0 to {candidates.count}")
    values = candidates.take(scores.detach())
    # The largest of values with NaN is NaN.
    if values.numel() and bool(values.max().isnan()):
        raise UndefinedScores(f"{int(values.isnan().sum())} of {values.numel()} scores are NaN; nothing is selected")
    if not k:
        return torch.zeros(0, dtype=torch.int64, device=values.device)
    # A sort or torch.topk orders ties differently on other machines. They yield only the k-th largest value here;
    # entries above it are in, and entries equal to it fill the remaining slots by index, so the result is unique.
    threshold = _find_kth_largest(values, k)
    selected = values > threshold
    ties = (values == threshold).nonzero()[:, 0]
    selected[ties[: k - int(torch.count_nonzero(selected))]] = True
    positions = selected.nonzero()[:, 0]
    return positions if candidates.is_full else candidates.find_indices(values.device)[positions]


def _find_kth_largest(values: Tensor, k: int) -> Tensor:
    """Return the ``k``-th largest of values ``(n,)`` without NaN, a scalar where they are."""
    if values.device.type == "cpu":
        # This takes a fifth of the time of torch.kthvalue.
        return torch.from_numpy(np.partition(values.numpy(), values.numel() - k))[values.numel() - k]
    return values.topk(k, sorted=False).values.min()


def top_k_per_tensor(
    scores: Tensor, k: int, layout: Layout, within: Mask, at_least: int, apart: Sequence[Mask] = ()
) -> Mask:
    """Select the ``k`` largest scores, among them the ``at_least`` largest of every tensor.

    The minimum keeps every layer connected. A tensor with fewer candidates keeps all of them. The entries of each mask
    of ``apart``, which are disjoint, are ranked among themselves, and as large a share of them is selected as of all.

    Raises:
        SelectionError: the minimum of all tensors exceeds ``k``; or as :func:`top_k`.
    """
    selected = Mask.empty(layout.size)
    if at_least:
        for spec in layout.tensors:
            candidates = Mask.from_tensors(layout, lambda s, spec=spec: s is spec) & within  # type: ignore[misc]
            selected = selected | top_k(scores, min(at_least, candidates.count), candidates)
    if selected.count > k:
        raise SelectionError(
            f"min_per_layer {at_least} needs {selected.count} live entries, but the sparsity leaves {k}"
        )
    left = within - selected
    for group in (mask & left for mask in apart if (mask & left).count):
        share = top_k(scores, (k - selected.count) * group.count // left.count, group)
        selected, left = selected | share, left - group
    return selected | top_k(scores, k - selected.count, left)


def prune_mask(mask: Mask, scores: Tensor, sparsity: float, pool: Mask) -> Mask:
    """Switch off the lowest-scored live entries of ``pool`` until ``floor(sparsity * |pool|)`` of the pool are off.

    Among ties the lowest index goes first (FedSparsify's purge). The result is nested in ``mask``: no entry is
    regrown, and a pool that is already sparse enough is unchanged.
    """
    live = mask & pool
    target = floor_fraction(sparsity, pool.count)
    surplus = live.count - (pool.count - target)
    if surplus <= 0:
        return mask
    return mask - top_k(-scores, surplus, within=live)


@lru_cache(maxsize=2)
def _get_full_mask(size: int) -> Mask:
    """Return the full mask; cached, because a mask computes its indices and fingerprint once and keeps them."""
    return Mask(torch.ones(size, dtype=torch.bool))
