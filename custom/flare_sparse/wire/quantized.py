"""Values of 8, 4, 2 or 1 bit: blocks with one scale each, rounded at random without bias; 1 bit is the sign.

A section holds: number of exact values (uint64) | exact values (float32) | scale of each block (bfloat16 bits, uint16)
| codes, packed from the lowest bit of each byte. Buffers are the exact values: a running variance that rounding made
negative would give NaN.

With ``b`` bits the code ``q`` of a block with the scale ``s`` means ``(2q - M) * s / M``, ``M = 2^b - 1``: no code is
unused, as in SparseLoCo (arXiv:2508.15706), whose 2-bit values these are with scales by the largest value. A scale is
that value rounded up to bfloat16, at most ``1 + 2^-7`` times as large. The rounding error of a value is below
``2s / M``, about two thirds of the block's largest value at 2 bits. So a residual cannot grow without bound: with
``r = 2 (1 + 2^-7) / M`` it stays below ``r / (1 - r)`` times the largest value that was ever added to it.

With one bit, where such rounding would only add noise, the code is the sign and the scale the mean magnitude of the
block, rounded to bfloat16, as in EF-SignSGD (arXiv:1901.09847, Algorithm 1) with a block in place of a layer. It is
biased, so the residual is what makes it right: of the block's energy a message carries the square of its mean magnitude
over its mean square, 64 % of normal values and at least 1 of 64, and the residual's norm cannot grow without bound.

A sender rounds where the values are, with the same bits on every device: each operation is one of IEEE 754 on tensors.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..core.errors import RejectedMessage
from ..core.exchange import Patch
from ..core.mask import Mask
from ..core.needs import Need
from ..core.params import Layout
from .number_format import CodedValues, Coding, NumberFormat, add_residual, require_finite, take_reference

BLOCK = 64
"""Values with a common scale. A scale costs 2 bytes, a quarter of a bit for each value; the largest of 64 normal values
is 2.4 standard deviations, that of 1,024 values 3.2, which would cost nearly half a bit of resolution."""

LARGEST = 1e38
"""Largest magnitude that a sender accepts: the sum of two such values is still a finite number."""

_PART = 1024 * BLOCK
"""Values that go through all passes together on a CPU, whose cache holds them. Passes over a whole vector would wait
for memory."""
_COUNT_BYTES = 8
_INFINITE_SCALE = 0x7F80
# Below this, scale / M could be subnormal, and a division by it could overflow. The value goes into the residual.
_SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True, kw_only=True)
class Quantized(NumberFormat):
    """Values of ``bits`` bits in blocks with a scale."""

    bits: int
    sends_differences: bool = True
    takes: Need | None = Need.EXACT_MODEL

    def compute_min_bytes(self, scalars: int, exact: int = 0) -> int:
        """Return the length of a section with so many values, ``exact`` of them buffers."""
        rounded = scalars - exact
        return _COUNT_BYTES + 4 * exact + 2 * -(-rounded // BLOCK) + -(-rounded * self.bits // 8)

    def measure(self, buffer: np.ndarray, scalars: int, layout: Layout) -> int:
        if buffer.size < _COUNT_BYTES:
            raise RejectedMessage("E_LEN", "values", f"at least {_COUNT_BYTES} bytes", buffer.size)
        exact = int.from_bytes(buffer[:_COUNT_BYTES].tobytes(), "little")
        if exact > scalars:
            raise RejectedMessage("E_SIZE", "exact values", f"at most {scalars}", exact)
        return self.compute_min_bytes(scalars, exact)

    def seal(self, patch: Patch, coding: Coding, out: np.ndarray | None = None) -> CodedValues:
        if coding.generator is None:
            raise ValueError("generator: values are rounded at random; give one that every attempt seeds alike")
        values = patch.values.detach()
        is_exact = patch.mask.find_buffers(coding.layout).to(values.device)
        reference = take_reference(patch.mask, coding.base_vector, values.device)
        # Error feedback, as in the plain formats; buffers have no residual, because they are not rounded.
        new_residual, with_residual = add_residual(patch, coding.residual)
        section, received = write_quantized(values, with_residual, reference, is_exact, self.bits, coding.generator)
        with_residual -= received
        if is_exact.any():
            with_residual[is_exact] = 0
        return CodedValues(section, patch.mask.put(with_residual, new_residual), received)

    def open(self, section: np.ndarray, mask: Mask, layout: Layout, base_vector: Tensor | None) -> Tensor:
        reference = take_reference(mask, base_vector)
        values = read_quantized(section, reference, mask.find_buffers(layout), self.bits)
        require_finite(values, "values")
        return values

    def can_hold(self, values: Tensor) -> bool:
        return bool((values.abs() <= LARGEST).all())


def write_quantized(
    exact_values: Tensor, target: Tensor, reference: Tensor, is_exact: Tensor, bits: int, generator: torch.Generator
) -> tuple[np.ndarray, Tensor]:
    """Return the section of values whose differences from ``reference`` are rounded, and what its receiver reads.

    The tensors are on one device; the section alone is copied to the CPU.

    Args:
        exact_values: float32 ``(k,)``; read where ``is_exact``.
        target: float32 ``(k,)``, what the receiver is to have.
        reference: float32 ``(k,)``, what it adds the differences to; overwritten with the values that it gets, because
            memory that is written for the first time costs more than the arithmetic.
        is_exact: bool ``(k,)``, values that are not rounded.
        bits: bits of a value.
        generator: source of the rounding; a retry needs one in the same state.

    Raises:
        RejectedMessage: a value is NaN or infinite, or above ``LARGEST``.
    """
    exact = exact_values[is_exact] if is_exact.any() else exact_values[:0]
    if not exact.isfinite().all():
        raise _refuse_values(bits)
    rounded, sums = (target, reference) if not exact.numel() else (target[~is_exact], reference[~is_exact])
    count = rounded.numel()
    scales = torch.empty(-(-count // BLOCK), dtype=torch.int16, device=rounded.device)
    packed = torch.empty(-(-count * bits // 8), dtype=torch.uint8, device=rounded.device)
    noise = np.random.SFC64(int(torch.randint(2**63 - 1, (), generator=generator)))
    part_size = _PART if rounded.device.type == "cpu" else max(count, 1)
    for part, in_blocks, in_bytes in _iterate_parts(count, part_size, bits):
        blocks = _subtract_in_blocks(rounded[part], sums[part])
        # The maximum of a block with NaN is NaN, which compares as false.
        largest = blocks.abs().amax(1)
        if not (largest <= LARGEST).all():
            raise _refuse_values(bits)
        number = sums[part].numel()
        if bits == 1:
            part_scales, codes = _take_signs(blocks, number)
        else:
            drawn = torch.from_numpy(_draw_noise(noise, number)).to(rounded.device)
            part_scales, codes = _round_blocks(blocks, largest, bits, drawn)
        scales[in_blocks] = part_scales.to(torch.int16)
        codes_out = packed[in_bytes]
        codes_out.copy_(_pack_codes(codes, bits)[: codes_out.numel()])
        # Compute values as the receiver does, so that the vectors of both ends stay equal bit for bit over all rounds.
        _add_blocks(sums[part], part_scales, codes, bits)
    header = torch.tensor(list(exact.numel().to_bytes(_COUNT_BYTES, "little")), dtype=torch.uint8, device=exact.device)
    # One copy of all parts to the CPU.
    section = torch.cat([header, *(part.contiguous().view(torch.uint8) for part in (exact, scales, packed))])
    return section.cpu().numpy(), _merge_values(sums, exact, is_exact)


def read_quantized(section: np.ndarray, reference: Tensor, is_exact: Tensor, bits: int) -> Tensor:
    """Return the values, float32 ``(k,)``, of a section whose length :meth:`Quantized.measure` has checked.

    Args:
        section: uint8 ``(n,)``, not trusted.
        reference: float32 ``(k,)`` on the CPU, what the rounded values are added to; overwritten with the values.
        is_exact: bool ``(k,)``, from the receiver's own layout.
        bits: bits of a value.

    Raises:
        RejectedMessage: a scale is negative or not finite, the section is not in canonical form, or the number of exact
            values is not that of the selected buffers.
    """
    count = int(is_exact.sum())
    rounded = is_exact.numel() - count
    stated = int.from_bytes(section[:_COUNT_BYTES].tobytes(), "little")
    # The length was checked with the stated number: padding to whole words can hide a difference of one.
    if stated != count:
        raise RejectedMessage("E_NNZ", "exact values", f"{count} selected entries of buffers", stated)
    exact_end = _COUNT_BYTES + 4 * count
    scales_end = exact_end + 2 * -(-rounded // BLOCK)
    # Copied, because the parts need not start at a multiple of their width.
    scales = np.frombuffer(section[exact_end:scales_end].tobytes(), "<u2").astype(np.int32)
    _check_scales(scales)
    packed = section[scales_end:]
    sums = reference if not count else reference[~is_exact]
    # Finite numbers may overflow in the sum; the caller checks that every value is finite.
    for part, in_blocks, in_bytes in _iterate_parts(rounded, _PART, bits):
        codes = _unpack_codes(packed[in_bytes], sums[part].numel(), bits)
        # A block of zeros has one form; other codes would carry data that no check of the values sees.
        if codes[scales[in_blocks] == 0].any():
            raise RejectedMessage("E_CANON", "codes", "zeros in a block with scale 0", "others")
        _add_blocks(sums[part], torch.from_numpy(scales[in_blocks]), torch.from_numpy(codes), bits)
    exact = np.frombuffer(section[_COUNT_BYTES:exact_end].tobytes(), "<f4").astype(np.float32)
    return _merge_values(sums, torch.from_numpy(exact), is_exact)


def _iterate_parts(count: int, size: int, bits: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield parts of ``count`` values: the slices of their values, of their blocks and of the bytes of their codes."""
    for start in range(0, count, size):
        end = min(start + size, count)
        yield (
            slice(start, end),
            slice(start // BLOCK, -(-end // BLOCK)),
            slice(start * bits // 8, -(-end * bits // 8)),
        )


def _draw_noise(source: np.random.SFC64, count: int) -> np.ndarray:
    """Return float32 ``(count,)``, uniform in (0, 1): the middles of ``2^16`` steps, so that their mean is 1/2.

    Raw words, because numpy may change how it makes numbers of them. Finer steps would be lost in a code of 8 bits.
    """
    words: np.ndarray = source.random_raw(-(-count // 4))
    noise = words.astype("<u8").view("<u2")[:count].astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-16)
    return noise


def _refuse_values(bits: int) -> RejectedMessage:
    return RejectedMessage("E_FINITE", f"values as int{bits}", f"numbers up to {LARGEST:g}", "others")


def _merge_values(sums: Tensor, exact: Tensor, is_exact: Tensor) -> Tensor:
    """Return the values ``(k,)`` of both kinds in their order."""
    if not exact.numel():
        return sums
    values = sums.new_empty(is_exact.numel())
    values[is_exact], values[~is_exact] = exact, sums
    return values


def _check_scales(scales: np.ndarray) -> None:
    if (scales >= 0x8000).any():
        raise RejectedMessage("E_RANGE", "scales", "numbers from 0", "a negative number")
    if (scales >= _INFINITE_SCALE).any():
        raise RejectedMessage("E_FINITE", "scales", "finite numbers", "NaN or infinity")


def _subtract_in_blocks(values: Tensor, base: Tensor) -> Tensor:
    """Return ``values - base``, float32 ``(n,)``, in blocks ``(blocks, BLOCK)``, padded with zeros."""
    count = values.numel()
    blocks = values.new_empty(-(-count // BLOCK), BLOCK)
    torch.sub(values, base, out=blocks.view(-1)[:count])
    blocks.view(-1)[count:] = 0
    return blocks


def _round_blocks(position: Tensor, largest: Tensor, bits: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales, bfloat16 bits as int32 ``(blocks,)``, and the codes, uint8 ``(blocks, BLOCK)``, of blocks.

    Args:
        position: float32 ``(blocks, BLOCK)``, finite; overwritten.
        largest: float32 ``(blocks,)``, the largest magnitude of each block.
        bits: bits of a code; those behind the last value are 0.
        noise: float32 ``(n,)``, uniform in [0, 1), for the values without the padding.
    """
    largest_code, size = 2**bits - 1, noise.numel()
    # Rounded up to bfloat16: a scale below the largest value would clip it, and the rounding would be biased.
    scales = (largest.view(torch.int32) + 0xFFFF) >> 16
    widened = _widen(scales)
    is_zero = widened < _SMALLEST_SCALE
    scales.masked_fill_(is_zero, 0)
    factors = torch.full_like(widened, largest_code / 2).div_(widened.masked_fill_(is_zero, torch.inf))
    position.mul_(factors[:, None]).add_(largest_code / 2)
    # The next lower code, or with the probability of the fraction the next higher one: right on average. A conversion
    # to integers drops the fraction; what lies below 0 is a rounding error, whose integer is 0.
    position.view(-1)[:size].add_(noise)
    codes = position.clamp_(max=largest_code).to(torch.int32).to(torch.uint8)
    if is_zero.any():
        codes[is_zero] = 0
    codes.view(-1)[size:] = 0
    return scales, codes


def _take_signs(position: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the scales, the mean magnitude of a block's values, and the codes as :func:`_round_blocks` does.

    Args:
        position: float32 ``(blocks, BLOCK)``, finite, padded with zeros; kept.
        size: number of values without the padding.
    """
    # A sum in halves has the same bits on every device, and halved values cannot overflow.
    means = position.abs()
    while means.shape[1] > 1:
        half = means.shape[1] // 2
        means = means[:, :half] / 2 + means[:, half:] / 2
    means = means[:, 0]
    if rest := size % BLOCK:
        means[-1] *= BLOCK / rest
    scales = (means.contiguous().view(torch.int32) + 0x8000) >> 16
    is_zero = _widen(scales) < _SMALLEST_SCALE
    scales.masked_fill_(is_zero, 0)
    codes = ((position >= 0) & ~is_zero[:, None]).to(torch.uint8)
    codes.view(-1)[size:] = 0
    return scales, codes


def _add_blocks(sums: Tensor, scales: Tensor, codes: Tensor, bits: int) -> None:
    """Add the values of codes ``(blocks, BLOCK)``, without the padding, to float32 ``(n,)`` in place.

    They have the same bits at both ends, which add them to one vector.
    """
    largest_code, widened = 2**bits - 1, _widen(scales)
    # Divide by a tensor: on a GPU, torch multiplies by the reciprocal of a number, which rounds twice.
    # (2q - M) * s / M with its factor 2 at the scale, which is exact and saves a pass.
    factors = 2 * (widened / torch.full_like(widened, largest_code))
    values = codes.float().sub_(largest_code / 2).mul_(factors[:, None])
    sums.add_(values.view(-1)[: sums.numel()])


def _widen(scales: Tensor) -> Tensor:
    """Return bfloat16 bits, int32, as float32."""
    return (scales << 16).view(torch.float32)


_WORDS = {8: torch.uint8, 4: torch.int16, 2: torch.int32, 1: torch.int64}
"""Type that holds the codes of a byte, each in a byte of its own, by the bits of a code."""


def _pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes ``(blocks, BLOCK)`` as bytes, the first one in the lowest bits."""
    # Read all codes of a byte as one word: one pass suffices over bytes that follow each other.
    words = codes.view(-1).view(_WORDS[bits])
    packed = words.clone()
    for place in range(1, 8 // bits):
        packed |= words >> ((8 - bits) * place)
    return packed.to(torch.uint8)


def _unpack_codes(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Return the codes, uint8 ``(blocks, BLOCK)``, those behind ``count`` 0.

    Raises:
        RejectedMessage: a padding bit of the last byte is set.
    """
    codes = np.zeros((-(-count // BLOCK), BLOCK), np.uint8)
    words = codes.reshape(-1).view(f"<u{8 // bits}")[: packed.size]
    words |= packed
    for place in range(1, 8 // bits):
        words |= packed.astype(words.dtype) << ((8 - bits) * place)
    codes &= np.uint8(2**bits - 1)
    if codes.reshape(-1)[count:].any():
        raise RejectedMessage("E_CANON", "padding of the codes", "zero bits", "other bits")
    return codes
