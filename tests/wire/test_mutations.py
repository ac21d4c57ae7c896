"""At least 100,000 damaged and forged messages: each one is refused with a code or decodes to a valid patch."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from thoroughness import count_cases

from flare_sparse.core.errors import WireError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import decode, encode
from flare_sparse.wire.envelope import HEADER_BYTES, write_checksums
from flare_sparse.wire.plan import Plan

LAYOUT = Layout(
    (TensorSpec("conv", (8, 4, 3, 3), "weight"), TensorSpec("fc", (10, 20), "weight"), TensorSpec("b", (8,), "bias"))
)
SIZE = LAYOUT.size
GENERATOR = torch.Generator().manual_seed(5)
BASE_MASK = Mask(torch.rand(SIZE, generator=GENERATOR) < 0.7)
MASK = Mask(torch.rand(SIZE, generator=GENERATOR) < 0.4)
VECTOR = torch.randn(SIZE, generator=GENERATOR)
PLAN = Plan(
    LAYOUT,
    "0123456789abcdef",
    base="4" * 16,
    base_mask=BASE_MASK,
    base_vector=VECTOR / 2,
    target="7" * 16,
    request="9" * 16,
    sequence=7,
    round=3,
    kind="train",
)


def build_messages() -> dict[str, np.ndarray]:
    """Return updates with a selection, within the base mask, with gaps and few bits, compressed; and a request."""
    few = Mask(torch.arange(SIZE) % 50 == 3)
    return {
        "bitmap": encode(Patch.from_vector(VECTOR, MASK), replace(PLAN, base_mask=None)).data,
        "shrink": encode(Patch.from_vector(VECTOR, MASK & BASE_MASK), PLAN).data,
        "gaps": encode(Patch.from_vector(VECTOR, few), PLAN, values="int4", generator=torch.Generator()).data,
        "compressed": encode(Patch.from_vector(torch.ones(SIZE), BASE_MASK), PLAN, values="float32_zstd").data,
        "request": encode(
            Patch.from_vector(VECTOR, Mask.full(SIZE), "previous"), PLAN, trainable=MASK, values="bfloat16"
        ).data,
    }


# Offset and width of the header fields before the checksums (docs/wire-format.md).
FIELDS = [(0, 4), (4, 2), *((at, 1) for at in range(6, 12)), (12, 4), (16, 8), (24, 8), (32, 8), (40, 8), (48, 16)]
FIELDS += [(64, 8), (72, 16), (88, 8), (96, 8), (104, 8)]


def fix_checksums(data: np.ndarray) -> np.ndarray:
    """Write valid checksums, as a forger would, if the section lengths fit the message."""
    if data.size < HEADER_BYTES:
        return data
    sections = sum(int(n) for n in np.frombuffer(data[96:112].tobytes(), "<u8"))
    start = -(-(HEADER_BYTES + sections) // 8) * 8
    if start <= data.size and not (data.size - start) % 8:
        write_checksums(data, start)
    return data


def flip_each_bit(data: np.ndarray) -> Iterator[np.ndarray]:
    for bit in range(8 * data.size):
        damaged = data.copy()
        damaged[bit // 8] ^= 1 << bit % 8
        yield damaged


def splice(data: np.ndarray, others: list[np.ndarray], rng: random.Random, count: int) -> Iterator[np.ndarray]:
    """Yield the start of one message followed by a piece of another, half of them followed by the rest of the first."""
    for _ in range(count):
        other = rng.choice(others)
        cut, stop = rng.randrange(data.size), rng.randrange(other.size)
        piece = other[stop : stop + rng.choice([1, 4, 8, 64, other.size])]
        rest = data[cut + piece.size * rng.randint(0, 1) :] if rng.random() < 0.5 else data[:0]
        yield np.concatenate([data[:cut], piece, rest])


def swap_fields(data: np.ndarray, other: np.ndarray) -> Iterator[np.ndarray]:
    """Yield messages with one or two header fields of another message, or with two fields of equal width swapped."""
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


def classify(data: np.ndarray) -> str:
    """Return the code that a message is refused with, or "harmless"; any other exception fails the test."""
    try:
        decoded = decode(data, PLAN, "site-1")
    except WireError as error:
        return error.code
    patch = decoded.patch
    assert patch.mask.size == SIZE
    assert patch.values.shape == (patch.mask.count,)
    assert torch.isfinite(patch.values).all()
    assert decoded.trainable is None or decoded.trainable.size == SIZE
    return "harmless"


@pytest.mark.long
def test_mutated_messages_are_refused_or_decode_to_valid_patches() -> None:
    messages, rng, outcomes = build_messages(), random.Random(11), Counter[str]()
    mutations = 0
    for name, data in messages.items():
        assert classify(data) == "harmless", name
        others = [*messages.values()]
        for flipped in flip_each_bit(data):
            assert classify(flipped) != "harmless", "checksums detect every flipped bit"
            outcomes[classify(fix_checksums(flipped))] += 1
            mutations += 2
        for end in range(data.size):
            assert classify(data[:end]) != "harmless", "checksums detect every truncation"
            outcomes[classify(fix_checksums(data[:end].copy()))] += 1
            mutations += 2
        for spliced in splice(data, others, rng, count_cases(15_000)):
            outcomes[classify(fix_checksums(spliced))] += 1
            mutations += 1
        for other in others:
            for swapped in swap_fields(data, other):
                outcomes[classify(fix_checksums(swapped))] += 1
                mutations += 1
    assert mutations >= count_cases(100_000)
    assert {"harmless", "E_LEN", "E_CANON", "E_NNZ", "E_FINITE", "E_VERSION", "E_NOT_HELD"} <= set(outcomes)
    assert all(code == "harmless" or code.startswith("E_") for code in outcomes)
