"""Gaps between selected entries in Golomb-Rice codes: close to the entropy of a selection at random."""

import numpy as np
import torch

from ...core.errors import RejectedMessage
from ...core.mask import Mask
from ...core.params import Layout
from .encoding import Encoding

_BLOCK = 256
_COUNT_BYTES = 8
_LARGEST_WIDTH = 40


class Gaps(Encoding):
    """Any selection; used for sparse ones whose entries do not form slices.

    The gap of a selected entry is the number of entries between it and the one before. A gap ``g`` in a block with the
    width ``b`` is written as ``g >> b`` (unary) and the lowest ``b`` bits of ``g`` (Rice 1979). With the width by
    Kiely 2004 ("Selecting the Golomb Parameter in Rice Coding", section 3), selections at random take at most 4 % more
    than their entropy. Each block of 256 gaps has its own width, since layers differ in density.

    Section: number of entries (uint64) | width of each block (uint8) | lowest bits of all gaps, the highest bit of each
    first | quotients of all gaps, each as that many 0 bits and a 1 bit. Both bit strings are padded to whole bytes.
    """

    name, code = "gaps", 7

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        # A bitmap is never longer for more entries; without them, a section takes less memory to decode.
        if 2 * mask.count > layout.size:
            return None
        return _COUNT_BYTES + -(-mask.count // _BLOCK) + -(-mask.count // 8)

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes | None:
        count = mask.count
        if 2 * count > layout.size:
            return None
        head = count.to_bytes(_COUNT_BYTES, "little")
        if not count:
            return head
        gaps = np.diff(mask.indices.numpy(), prepend=-1) - 1
        block_widths = _choose_widths(gaps)
        widths = np.repeat(block_widths.astype(np.int64), _count_by_block(count))
        low_bits = np.packbits(_write_low_bits(gaps, widths))
        unary = np.zeros(count + int((gaps >> widths).sum()), np.uint8)
        unary[np.cumsum((gaps >> widths) + 1) - 1] = 1
        return head + block_widths.tobytes() + low_bits.tobytes() + np.packbits(unary).tobytes()

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        gaps = _read_gaps(section, layout.size)
        bits = np.zeros(layout.size, dtype=bool)
        # Every gap is below P, so that no sum of them overflows.
        positions = np.cumsum(gaps + 1) - 1
        if positions.size and positions[-1] >= layout.size:
            raise RejectedMessage("E_INDEX", "gaps", f"positions below {layout.size}", int(positions[-1]))
        bits[positions] = True
        return Mask(torch.from_numpy(bits))


def _read_gaps(section: np.ndarray, size: int) -> np.ndarray:
    """Return the gaps of a section that is not trusted, int64 ``(k,)``, each below ``size``.

    Raises:
        RejectedMessage: a length is wrong, a gap is too large, or the section is not in canonical form.
    """
    if section.size < _COUNT_BYTES:
        raise RejectedMessage("E_LEN", "gaps", f"at least {_COUNT_BYTES} bytes", section.size)
    count = int.from_bytes(section[:_COUNT_BYTES].tobytes(), "little")
    if 2 * count > size:
        raise RejectedMessage("E_SIZE", "gaps", f"at most {size // 2} entries", count)
    widths_end = _COUNT_BYTES + -(-count // _BLOCK)
    block_widths = section[_COUNT_BYTES:widths_end]
    if section.size < widths_end or (block_widths > _LARGEST_WIDTH).any():
        raise RejectedMessage("E_LEN", "gaps", f"{widths_end} bytes, widths up to {_LARGEST_WIDTH}", section.size)
    num_low_bits = int(np.dot(block_widths.astype(np.int64), _count_by_block(count)))
    unary_start = widths_end + -(-num_low_bits // 8)
    # Unpacked, bits take eight times their length in memory. With the widths of _choose_widths, neither string of bits
    # is longer than a bitmap: a block has at most one bit in each for every entry that its gaps pass or select.
    if num_low_bits > size or not unary_start <= section.size <= unary_start + -(-size // 8):
        expected = f"strings of at most {size} bits, the first in {widths_end} to {unary_start}"
        raise RejectedMessage("E_LEN", "gaps", expected, section.size)
    # Counted while they are packed: the position of a 1 bit takes eight bytes, and there may be any number of them.
    num_quotients = int(np.bitwise_count(section[unary_start:]).sum())
    # The last 1 bit lies in the last byte: otherwise there are bytes that mean nothing.
    if num_quotients != count or (section.size > unary_start and not section[-1]):
        raise RejectedMessage("E_LEN", "gaps", f"{count} quotients, the last one in the last byte", num_quotients)
    widths = np.repeat(block_widths.astype(np.int64), _count_by_block(count))
    low_bits = np.unpackbits(section[widths_end:unary_start])
    ends = np.flatnonzero(np.unpackbits(section[unary_start:]))
    quotients = np.diff(ends, prepend=-1) - 1
    # Compared before the shift, which could overflow.
    if (quotients > (size >> widths)).any():
        raise RejectedMessage("E_INDEX", "gaps", f"gaps below {size}", "a larger gap")
    gaps: np.ndarray = (quotients << widths) + _read_low_bits(low_bits[:num_low_bits], widths)
    if low_bits[num_low_bits:].any() or not np.array_equal(_choose_widths(gaps), block_widths):
        raise RejectedMessage("E_CANON", "gaps", "the width of each block, zero bits as padding", "others")
    return gaps


def _choose_widths(gaps: np.ndarray) -> np.ndarray:
    """Return the width of each block, uint8: that of a geometric distribution with the mean of the block's gaps."""
    if not gaps.size:
        return np.zeros(0, np.uint8)
    counts, starts = _count_by_block(gaps.size), np.arange(0, gaps.size, _BLOCK)
    # 1 + floor(log2(0.4812 * (mean + 0.5))), 0 if that is negative; in integers, so that both ends agree on it.
    thresholds = 77 * (2 * np.add.reduceat(gaps, starts) + counts) // (320 * counts)
    # frexp gives the number of binary digits: exact, since the thresholds are far below 2^53.
    digits: np.ndarray = np.frexp(thresholds.astype(np.float64))[1]
    return digits.astype(np.uint8)


def _count_by_block(count: int) -> np.ndarray:
    """Return the number of gaps in each block, int64: the last one may be shorter."""
    return np.diff(np.arange(0, count, _BLOCK), append=count)


def _write_low_bits(gaps: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the lowest ``widths`` bits of the gaps, one after the other, uint8 0 or 1."""
    ends = np.cumsum(widths)
    bits = np.zeros(int(ends[-1]), np.uint8)
    for place in range(int(widths.max())):
        used = widths > place
        bits[ends[used] - 1 - place] = (gaps[used] >> place) & 1
    return bits


def _read_low_bits(bits: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the numbers, int64 ``(k,)``, that :func:`_write_low_bits` wrote."""
    numbers, ends = np.zeros(widths.size, np.int64), np.cumsum(widths)
    for place in range(int(widths.max()) if widths.size else 0):
        used = widths > place
        numbers[used] |= bits[ends[used] - 1 - place].astype(np.int64) << place
    return numbers
