"""At least 100,000 damaged and forged messages on every run: each is refused with a code, or harmless."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import torch

from flare_sparse.errors import WireError
from flare_sparse.exchange import Patch
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.wire import envelope
from flare_sparse.wire.codec import decode, encode
from flare_sparse.wire.envelope import HEADER_BYTES
from flare_sparse.wire.plan import Plan

LAYOUT = Layout(
    (TensorSpec("conv", (8, 4, 3, 3), "weight"), TensorSpec("fc", (10, 20), "weight"), TensorSpec("b", (8,), "bias"))
)
SIZE = LAYOUT.size
DRAW = torch.Generator().manual_seed(5)
KNOWN = Mask(torch.rand(SIZE, generator=DRAW) < 0.7)
ON = Mask(torch.rand(SIZE, generator=DRAW) < 0.4)
PLAN = Plan(LAYOUT, "0123456789abcdef", base_mask=KNOWN, base_sequence=4, sequence=7, round=3, kind="train")
VECTOR = torch.randn(SIZE, generator=DRAW)


def messages() -> dict[str, np.ndarray]:
    """One answer with a selection of its own, one over a known mask, one question with both sections."""
    return {
        "bitmap": encode(Patch.from_vector(VECTOR, ON), replace(PLAN, base_mask=None)).data,
        "shrink": encode(Patch.from_vector(VECTOR, ON & KNOWN), PLAN).data,
        "question": encode(
            Patch.from_vector(VECTOR, Mask.full(SIZE), "previous"), PLAN, trainable=ON, values="bfloat16"
        ).data,
    }


# A header's fields by offset and width, docs/wire-format.md; the checksums come after them.
FIELDS = [(0, 4), (4, 2), *((at, 1) for at in range(6, 12)), (12, 4), (16, 8), (24, 8), (32, 16), (48, 8), (56, 16)]
FIELDS += [(72, 16), (88, 8), (96, 8), (104, 8)]


def resealed(data: np.ndarray) -> np.ndarray:
    """With checksums that hold, where the lengths leave room for them: what a forger would send."""
    if data.size < HEADER_BYTES:
        return data
    sections = sum(int(n) for n in np.frombuffer(data[96:112].tobytes(), "<u8"))
    start = -(-(HEADER_BYTES + sections) // 8) * 8
    if start <= data.size and not (data.size - start) % 8:
        checks = envelope._CHECKS.pack(*envelope._checksums(data, start))
        data[112:HEADER_BYTES] = np.frombuffer(checks, np.uint8)
    return data


def flips(data: np.ndarray) -> Iterator[np.ndarray]:
    for bit in range(8 * data.size):
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        yield damaged


def splices(data: np.ndarray, others: list[np.ndarray], draw: random.Random, count: int) -> Iterator[np.ndarray]:
    """The beginning of one message and the end of another, or a piece of one inside another."""
    for _ in range(count):
        other = draw.choice(others)
        cut, stop = draw.randrange(data.size), draw.randrange(other.size)
        piece = other[stop : stop + draw.choice([1, 4, 8, 64, other.size])]
        rest = data[cut + piece.size * draw.randint(0, 1) :] if draw.random() < 0.5 else data[:0]
        yield np.concatenate([data[:cut], piece, rest])


def swaps(data: np.ndarray, other: np.ndarray) -> Iterator[np.ndarray]:
    """Header fields of another message, one and two at a time, and two fields of equal width in each other's place."""
    for chosen in [*combinations(FIELDS, 1), *combinations(FIELDS, 2)]:
        mixed = data.copy()
        for at, width in chosen:
            mixed[at : at + width] = other[at : at + width]
        yield mixed
    for (first, width), (second, same) in combinations(FIELDS, 2):
        if width == same:
            crossed = data.copy()
            crossed[first : first + width] = data[second : second + width]
            crossed[second : second + width] = data[first : first + width]
            yield crossed


def verdict(data: np.ndarray) -> str:
    """The code that a message is refused with, or "harmless"; anything else that is raised fails the test."""
    try:
        said = decode(data, PLAN, "site-1")
    except WireError as error:
        return error.code
    patch = said.patch
    assert patch.mask.size == SIZE
    assert patch.values.shape == (patch.mask.count,)
    assert torch.isfinite(patch.values).all()
    assert said.trainable is None or said.trainable.size == SIZE
    return "harmless"


def test_a_hundred_thousand_mutations() -> None:
    sent, draw, verdicts = messages(), random.Random(11), Counter[str]()
    damaged = 0
    for name, data in sent.items():
        assert verdict(data) == "harmless", name
        others = [*sent.values()]
        for flipped in flips(data):
            assert verdict(flipped) != "harmless", "checksums find every flipped bit"
            verdicts[verdict(resealed(flipped))] += 1
            damaged += 2
        for end in range(data.size):
            assert verdict(data[:end]) != "harmless", "checksums find every cut"
            verdicts[verdict(resealed(data[:end].copy()))] += 1
            damaged += 2
        for spliced in splices(data, others, draw, 15_000):
            verdicts[verdict(resealed(spliced))] += 1
            damaged += 1
        for other in others:
            for swapped in swaps(data, other):
                verdicts[verdict(resealed(swapped))] += 1
                damaged += 1
    assert damaged >= 100_000
    assert {"harmless", "E_LEN", "E_CANON", "E_NNZ", "E_FINITE", "E_VERSION", "E_NOT_HELD"} <= set(verdicts)
    assert all(code == "harmless" or code.startswith("E_") for code in verdicts)
