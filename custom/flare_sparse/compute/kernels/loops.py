"""Compiled loops of the sparse convolution, on volumes that are padded and flattened once.

In a padded, flattened volume every tap of a kernel is a constant shift of the flat index. The output of a channel is
then a sum of a few shifted copies of the input, one for each live weight, over contiguous memory.

Every output channel of every sample is computed by one thread, in the same order of operations however the channels
are divided among threads. The bits of a result therefore do not depend on the number of threads.

All loops are in this one file: numba compiles a cached loop again only if the loop's own file has changed, not if that
of a loop that it calls has. It finds the cache by the line in which the loop begins, and fails where a class of the old
arguments no longer exists: a loop whose arguments change must begin in another line than before.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from .geometry import Grid, Norm, Part, Weights, Window

CHUNK = 1024
"""Positions that are accumulated at a time: 4 kB of sums and of each input stay in the first-level cache."""

SLAB = 16384
"""Positions after which normalisation sums and pooling are done, while the sums are in the second-level cache."""


# Reassociation lets the compiler use vector instructions for sums. The order is fixed when the loop is compiled.
# NaN and infinity keep their meaning, because a diverged model must be noticed.
_OPTIONS: Any = {"fastmath": {"reassoc", "contract", "nsz"}, "nogil": True, "error_model": "numpy"}


def _inline(function: Callable[..., Any]) -> Any:
    # A part of each loop that calls it, before that is compiled. The compiler would inline it only into a loop that is
    # compiled along with it, not into one that finds it in the cache, and the sums of the two differ in the last bits.
    return njit(inline="always", **_OPTIONS)(function)


def _compile(function: Callable[..., Any]) -> Any:
    try:
        return njit(cache=True, **_OPTIONS)(function)
    # No folder for the compiled code is writable: it is compiled again in every process.
    except RuntimeError:
        return njit(**_OPTIONS)(function)


@_inline
def accumulate(sums: Any, source: Any, weights: Weights, channel: int, count: int) -> None:
    """Set ``sums[i]`` to the sum of ``values[k] * source[offsets[k] + i]`` over the channel's weights ``k``."""
    offsets, values = weights.offsets, weights.values
    last = weights.starts[channel + 1]
    for start in range(0, count, CHUNK):
        n = min(CHUNK, count - start)
        out = sums[start : start + n]
        x = source[start:]
        k = weights.starts[channel]
        out[:] = 0
        # Eight weights at a time: the sums are read and written once for eight multiplications.
        while k + 8 <= last:
            x0, x1 = x[offsets[k] : offsets[k] + n], x[offsets[k + 1] : offsets[k + 1] + n]
            x2, x3 = x[offsets[k + 2] : offsets[k + 2] + n], x[offsets[k + 3] : offsets[k + 3] + n]
            x4, x5 = x[offsets[k + 4] : offsets[k + 4] + n], x[offsets[k + 5] : offsets[k + 5] + n]
            x6, x7 = x[offsets[k + 6] : offsets[k + 6] + n], x[offsets[k + 7] : offsets[k + 7] + n]
            v0, v1, v2, v3 = values[k], values[k + 1], values[k + 2], values[k + 3]
            v4, v5, v6, v7 = values[k + 4], values[k + 5], values[k + 6], values[k + 7]
            for i in range(n):
                out[i] += (v0 * x0[i] + v1 * x1[i] + v2 * x2[i] + v3 * x3[i]) + (
                    v4 * x4[i] + v5 * x5[i] + v6 * x6[i] + v7 * x7[i]
                )
            k += 8
        while k + 2 <= last:
            x0, x1 = x[offsets[k] : offsets[k] + n], x[offsets[k + 1] : offsets[k + 1] + n]
            v0, v1 = values[k], values[k + 1]
            for i in range(n):
                out[i] += v0 * x0[i] + v1 * x1[i]
            k += 2
        if k < last:
            x0, v0 = x[offsets[k] : offsets[k] + n], values[k]
            for i in range(n):
                out[i] += v0 * x0[i]


@_inline
def correlate(gradient: Any, source: Any, weights: Weights, channel: int, count: int, products: Any) -> None:
    """Add the inner product of ``gradient`` and ``source[offsets[k]:]`` to ``products[k]`` for each weight ``k``."""
    offsets = weights.offsets
    last = weights.starts[channel + 1]
    for start in range(0, count, CHUNK):
        n = min(CHUNK, count - start)
        g = gradient[start : start + n]
        x = source[start:]
        k = weights.starts[channel]
        while k + 4 <= last:
            x0, x1 = x[offsets[k] : offsets[k] + n], x[offsets[k + 1] : offsets[k + 1] + n]
            x2, x3 = x[offsets[k + 2] : offsets[k + 2] + n], x[offsets[k + 3] : offsets[k + 3] + n]
            s0, s1, s2, s3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for i in range(n):
                s0 += g[i] * x0[i]
                s1 += g[i] * x1[i]
                s2 += g[i] * x2[i]
                s3 += g[i] * x3[i]
            products[k] += s0
            products[k + 1] += s1
            products[k + 2] += s2
            products[k + 3] += s3
            k += 4
        while k < last:
            x0, s0 = x[offsets[k] : offsets[k] + n], np.float32(0)
            for i in range(n):
                s0 += g[i] * x0[i]
            products[k] += s0
            k += 1


@_compile
def convolve(
    source: Any, weights: Weights, grid: Grid, window: Window, signs: Any, pivots: Any, moments: Any, output: Any,
    positions: Any, values: Any, part: Part,
) -> None:  # fmt: skip
    """Convolve the samples and channels of a part, pool the result, and sum it for normalisation.

    Args:
        source: ``(samples, positions)`` padded, flattened input of all channels.
        weights: live weights by output channel.
        grid: output positions.
        window: pooling window.
        signs: ``(channels,)`` 1: pool the largest value, -1: pool the smallest one.
        pivots: ``(samples, channels)`` receives the value that is subtracted before squaring, against cancellation.
        moments: ``(samples, channels, 2)`` receives sum and sum of squares, less the pivot; without channels: not
            computed.
        output: ``(samples, channels, pooled)`` receives the pooled values; it holds zeros.
        positions: ``(samples, channels, pooled)`` receives the index of each pooled value; without channels: not
            recorded.
        values: ``(samples, channels, positions)`` receives the convolution's output; without channels: not recorded.
        part: what is computed.
    """
    planes = count_slab_planes(grid, window)
    sums = np.empty(planes * grid.plane, np.float32)
    best, best_at = np.empty(grid.width, np.float32), np.empty(grid.width, np.int32)
    for n in range(part.first_sample, part.last_sample):
        for z in range(0, grid.depth, planes):
            depth = min(planes, grid.depth - z)
            count, slab = count_positions(grid, depth), source[n, z * grid.plane :]
            for c in range(part.first_channel, part.last_channel):
                # The output of a channel without live weights stays 0.
                if weights.starts[c] == weights.starts[c + 1]:
                    continue
                accumulate(sums, slab, weights, c, count)
                if values.shape[1]:
                    values[n, c, z * grid.plane : z * grid.plane + count] = sums[:count]
                if moments.shape[1]:
                    if z == 0:
                        pivots[n, c] = average(sums, grid, depth)
                    add_moments(sums, grid, depth, pivots[n, c], moments[n, c])
                recorded = positions[n, c] if positions.shape[1] else best_at[:0]
                for plane in range(depth // window.depth):
                    start, number = plane * window.depth * grid.plane, z // window.depth + plane
                    if window.depth * window.height * window.width == 1:
                        copy_plane(sums[start:], grid, output[n, c], number)
                    else:
                        pool_plane(sums, start, grid, window, signs[c], output[n, c], number, recorded, best, best_at)


@_inline
def count_slab_planes(grid: Grid, window: Window) -> Any:
    """Return the planes of a slab: a multiple of the pooling window, near ``SLAB`` positions."""
    return window.depth * max(1, SLAB // (window.depth * grid.plane))


@_inline
def count_positions(grid: Grid, planes: int) -> Any:
    """Return the number of contiguous positions that hold the outputs of some planes."""
    return (planes - 1) * grid.plane + (grid.height - 1) * grid.row + grid.width


@_inline
def average(sums: Any, grid: Grid, depth: int) -> float:
    """Return the mean of a slab's values; a single one could be an outlier."""
    total = np.float64(0)
    for z in range(depth):
        for y in range(grid.height):
            start = z * grid.plane + y * grid.row
            s = np.float32(0)
            for i in range(start, start + grid.width):
                s += sums[i]
            total += s
    return total / (depth * grid.height * grid.width)


@_inline
def add_moments(sums: Any, grid: Grid, depth: int, pivot: float, moments: Any) -> None:
    """Add sum and sum of squares of a slab's values, less ``pivot``, to ``moments``."""
    total, squares = np.float64(0), np.float64(0)
    for z in range(depth):
        for y in range(grid.height):
            start = z * grid.plane + y * grid.row
            row = sums[start : start + grid.width]
            s, q = np.float32(0), np.float32(0)
            for i in range(grid.width):
                value = row[i] - pivot
                s += value
                q += value * value
            # Rows are added in float64: a float32 sum over a volume of 10^6 values loses half its digits.
            total += s
            squares += q
    moments[0] += total
    moments[1] += squares


@_inline
def copy_plane(sums: Any, grid: Grid, output: Any, plane: int) -> None:
    """Write a plane of values that are not pooled."""
    for y in range(grid.height):
        start = (plane * grid.height + y) * grid.width
        output[start : start + grid.width] = sums[y * grid.row : y * grid.row + grid.width]


@_inline
def pool_plane(
    sums: Any, first: int, grid: Grid, window: Window, sign: float, output: Any, plane: int, positions: Any, best: Any,
    best_at: Any,
) -> None:  # fmt: skip
    """Write a plane of pooled values and record their positions in the slab; incomplete windows are left out."""
    height, width = grid.height // window.height, grid.width // window.width
    for y in range(height):
        # First over planes and rows, where neighbouring windows are contiguous, then within the row.
        for dz in range(window.depth):
            for dy in range(window.height):
                at = first + dz * grid.plane + (y * window.height + dy) * grid.row
                row = sums[at : at + grid.width]
                if dz + dy == 0:
                    for i in range(grid.width):
                        best[i] = row[i] * sign
                        best_at[i] = at + i
                elif len(positions):
                    keep_larger_positions(best, best_at, row, sign, at)
                else:
                    keep_larger(best, row, sign)
        start = (plane * height + y) * width
        if len(positions):
            pool_row_positions(best, best_at, window, output[start : start + width], positions[start : start + width])
        else:
            pool_row(best, window, output[start : start + width])
        for i in range(start, start + width):
            output[i] *= sign


# The four loops below select instead of branching: which of two values is larger cannot be predicted, and a branch
# that is predicted wrongly costs more than the rest of the pooling. NaN replaces a number and stays, as in torch.


@_inline
def keep_larger(best: Any, row: Any, sign: float) -> None:
    """Set ``best[i]`` to the larger of itself and ``sign * row[i]``."""
    for i in range(len(best)):
        value = row[i] * sign
        larger = (value > best[i]) | (value != value)  # noqa: PLR0124
        best[i] = value if larger else best[i]


@_inline
def keep_larger_positions(best: Any, best_at: Any, row: Any, sign: float, at: int) -> None:
    """As :func:`keep_larger`; ``best_at[i]`` becomes ``at + i`` where the value is replaced."""
    for i in range(len(best)):
        value = row[i] * sign
        larger = (value > best[i]) | (value != value)  # noqa: PLR0124
        best[i] = value if larger else best[i]
        best_at[i] = at + i if larger else best_at[i]


@_inline
def pool_row(best: Any, window: Window, output: Any) -> None:
    """Set ``output[i]`` to the largest value of the window ``i`` of a row."""
    for i in range(len(output)):
        largest = best[i * window.width]
        for k in range(i * window.width + 1, (i + 1) * window.width):
            value = best[k]
            larger = (value > largest) | (value != value)  # noqa: PLR0124
            largest = value if larger else largest
        output[i] = largest


@_inline
def pool_row_positions(best: Any, best_at: Any, window: Window, output: Any, positions: Any) -> None:
    """As :func:`pool_row`, with the positions; of equal values the first in memory counts, as in torch."""
    for i in range(len(output)):
        largest, position = best[i * window.width], best_at[i * window.width]
        for k in range(i * window.width + 1, (i + 1) * window.width):
            value, at = best[k], best_at[k]
            larger = (value > largest) | (value != value) | ((value == largest) & (at < position))  # noqa: PLR0124
            largest = value if larger else largest
            position = at if larger else position
        output[i], positions[i] = largest, position


@_compile
def scale_and_activate(output: Any, scales: Any, shifts: Any, slope: float, kept: Any, part: Part) -> None:
    """Replace pooled values ``v`` by ``u = scale * v + shift``, times ``slope`` if negative; copy ``v`` to ``kept``.

    Args:
        output: ``(samples, channels, pooled)``.
        scales: ``(samples, channels)``.
        shifts: ``(samples, channels)``.
        slope: 0 for ReLU, 1 for no activation.
        kept: ``(samples, channels, pooled)``; without channels: not written.
        part: what is computed.
    """
    # ReLU of -infinity is 0, but 0 * -infinity is NaN. NaN is not smaller and stays.
    lowest = np.float32(-3e38) if slope == 0 else np.float32(-np.inf)
    for n in range(part.first_sample, part.last_sample):
        for c in range(part.first_channel, part.last_channel):
            scale, shift, values = scales[n, c], shifts[n, c], output[n, c]
            if kept.shape[1]:
                kept[n, c] = values
            for i in range(len(values)):
                u = scale * values[i] + shift
                negative = max(u, lowest)
                values[i] = u if u > 0 else slope * negative


@_compile
def differentiate_activation(
    gradient: Any, pooled: Any, scales: Any, shifts: Any, slope: float, moments: Any, part: Part
) -> None:
    """Multiply ``gradient`` by the activation's derivative in place; sum it, and its product with ``pooled``.

    Args:
        gradient: ``(samples, channels, pooled)`` gradient of the block's output.
        pooled: ``(samples, channels, pooled)`` values before normalisation.
        scales: ``(samples, channels)`` scale of the normalisation.
        shifts: ``(samples, channels)`` shift of the normalisation.
        slope: derivative of the activation for negative values.
        moments: ``(samples, channels, 2)`` receives the two sums.
        part: what is computed.
    """
    for n in range(part.first_sample, part.last_sample):
        for c in range(part.first_channel, part.last_channel):
            scale, shift = scales[n, c], shifts[n, c]
            total, product = np.float64(0), np.float64(0)
            for start in range(0, gradient.shape[2], CHUNK):
                g, v = gradient[n, c, start : start + CHUNK], pooled[n, c, start : start + CHUNK]
                s, p = np.float32(0), np.float32(0)
                for i in range(len(g)):
                    g[i] = g[i] if scale * v[i] + shift > 0 else slope * g[i]
                    s += g[i]
                    p += g[i] * v[i]
                total += s
                product += p
            moments[n, c, 0] = total
            moments[n, c, 1] = product


@_compile
def differentiate_block(
    source: Any, weights: Weights, grid: Grid, window: Window, gradient: Any, positions: Any, values: Any, norm: Norm,
    products: Any, output: Any, lead: int, part: Part,
) -> None:  # fmt: skip
    """Compute the gradient of a convolution's output, and from it that of the live weights.

    The convolution's output is computed again, slab by slab, if it was not recorded.

    Args:
        source: ``(samples, positions)`` padded, flattened input of all channels.
        weights: live weights by output channel.
        grid: output positions.
        window: pooling window.
        gradient: ``(samples, channels, pooled)`` gradient of the pooled values.
        positions: ``(samples, channels, pooled)`` index of each pooled value in its slab; without channels: no pooling.
        values: ``(samples, channels, positions)`` the convolution's output; without channels: not recorded.
        norm: derivative of the normalisation.
        products: ``(live,)`` receives the gradient of the live weights, added to what it holds.
        output: ``(samples, channels, lead + positions)`` receives the gradient of the convolution's output; without
            channels: not written.
        lead: index of the first position in ``output``.
        part: what is computed; all samples, because the order in which they are added must not depend on the threads.
    """
    planes = count_slab_planes(grid, window)
    sums = np.zeros(planes * grid.plane, np.float32)
    size = (grid.height // window.height) * (grid.width // window.width)
    for n in range(part.first_sample, part.last_sample):
        for z in range(0, grid.depth, planes):
            depth = min(planes, grid.depth - z)
            count, slab = count_positions(grid, depth), source[n, z * grid.plane :]
            pooled = slice(z // window.depth * size, (z // window.depth + depth // window.depth) * size)
            for c in range(part.first_channel, part.last_channel):
                if weights.starts[c] == weights.starts[c + 1]:
                    continue
                scale, constant, factor = norm.scales[n, c], norm.constants[n, c], norm.factors[n, c]
                # y, the convolution's output, is needed only if the factor is not 0: of a fixed map the gradient does
                # not depend on it.
                if factor != 0 and values.shape[1]:
                    sums[:count] = values[n, c, z * grid.plane : z * grid.plane + count]
                elif factor != 0:
                    accumulate(sums, slab, weights, c, count)
                # From here on ``sums`` is the gradient of y: what mean and variance add, then that of pooled values.
                transform_rows(sums, grid, depth, constant, factor)
                g = gradient[n, c, pooled]
                if positions.shape[1]:
                    at = positions[n, c, pooled]
                    for i in range(len(g)):
                        sums[at[i]] += scale * g[i]
                else:
                    add_rows(sums, grid, depth, scale, g)
                correlate(sums, slab, weights, c, count, products)
                if output.shape[1]:
                    output[n, c, lead + z * grid.plane : lead + z * grid.plane + count] = sums[:count]


@_inline
def transform_rows(sums: Any, grid: Grid, depth: int, constant: float, factor: float) -> None:
    """Replace a slab's values ``y`` by ``constant + factor * y``, and the padding between the rows by 0."""
    for z in range(depth):
        for y in range(grid.height):
            row = sums[z * grid.plane + y * grid.row :]
            for i in range(grid.width):
                # With factor 0 the row does not hold y but what came before, which may be infinite.
                row[i] = constant + factor * row[i] if factor != 0 else constant
            row[grid.width : min(grid.row, len(row))] = 0
        sums[z * grid.plane + grid.height * grid.row : (z + 1) * grid.plane] = 0


@_inline
def add_rows(sums: Any, grid: Grid, depth: int, scale: float, gradient: Any) -> None:
    """Add ``scale * gradient`` to the values of a slab that was not pooled."""
    for z in range(depth):
        for y in range(grid.height):
            row = sums[z * grid.plane + y * grid.row :]
            g = gradient[(z * grid.height + y) * grid.width :]
            for i in range(grid.width):
                row[i] += scale * g[i]


@_compile
def convolve_back(gradient: Any, weights: Weights, count: int, output: Any, origin: int, part: Part) -> None:
    """Write the gradient of the input for the samples and input channels of a part.

    Args:
        gradient: ``(samples, channels * positions)`` gradient of the convolution's output, flattened.
        weights: live weights by input channel.
        count: number of contiguous positions to write.
        output: ``(samples, channels, positions)``.
        origin: first position to write.
        part: what is computed.
    """
    for n in range(part.first_sample, part.last_sample):
        for start in range(0, count, SLAB):
            size = min(SLAB, count - start)
            for c in range(part.first_channel, part.last_channel):
                sums = output[n, c, origin + start : origin + start + size]
                accumulate(sums, gradient[n, start:], weights, c, size)
