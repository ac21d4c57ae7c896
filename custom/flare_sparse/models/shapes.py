"""Sizes of feature maps along one axis, and what to say when nothing is left of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from ..errors import ConfigError

Axis = Callable[[int], int]
"""Length of the last feature map as a function of the length of the input, along one axis."""


def windows(size: int, kernel: int, stride: int = 1) -> int:
    """Positions of an unpadded window along an axis of ``size``; 0 when it does not fit.

    >>> windows(121, kernel=5, stride=2), windows(2, kernel=3)
    (59, 0)
    """
    return (size - kernel) // stride + 1 if size >= kernel else 0


def feature_map(name: str, shape: Sequence[int], axis: Axis, *, at_least: int = 1) -> tuple[int, ...]:
    """Shape of a network's last feature map.

    Args:
        name: of the network, for the error.
        shape: of the input, without channels.
        axis: the network's arithmetic.
        at_least: fewest elements that the map must have; 2 where an instance normalisation reads it.

    Raises:
        ConfigError: nothing would be left; the message names the smallest input of this aspect that works.
    """
    last = tuple(axis(size) for size in shape)
    if min(last) >= 1 and prod(last) >= at_least:
        return last
    raise ConfigError(
        f"model {name!r}: input {_text(shape)} is too small, its last feature map would be {_text(last)}; the smallest "
        f"that works is {_text(_smallest(shape, axis, at_least))}. Give larger images, or choose a smaller model."
    )


def _smallest(shape: Sequence[int], axis: Axis, at_least: int) -> tuple[int, ...]:
    """The input grown axis by axis just until it works; an axis that is long enough is left as it is."""
    grown = [_grow(size, axis, 1) for size in shape]
    if prod(axis(size) for size in grown) < at_least:
        grown[-1] = _grow(grown[-1], axis, at_least)
    return tuple(grown)


def _grow(size: int, axis: Axis, wanted: int) -> int:
    while axis(size) < wanted:
        size += 1
    return size


def _text(shape: Sequence[int]) -> str:
    return "x".join(str(size) for size in shape)
