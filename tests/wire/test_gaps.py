"""Gap-coded selections: within 4 % of the entropy of a selection at random, one form, and no trust in any number."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.encodings import ENCODINGS, choose_encoding, compute_selection_entropy, count_entries_within
from flare_sparse.wire.envelope import HEADER_BYTES
from flare_sparse.wire.formats import FORMATS

GAPS = ENCODINGS["gaps"]
SIZE = 200_000
LAYOUT = Layout((TensorSpec("w", (SIZE,), "weight"),))


def draw_mask(density: float, seed: int = 1, size: int = SIZE) -> Mask:
    return Mask(torch.rand(size, generator=torch.Generator().manual_seed(seed)) < density)


def decode(section: bytes, layout: Layout = LAYOUT) -> Mask:
    return GAPS.decode(np.frombuffer(section, np.uint8), None, layout)


@pytest.mark.parametrize("density", [0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.001])
def test_random_selection_takes_at_most_4_percent_more_than_its_entropy(density: float) -> None:
    mask = draw_mask(density)
    section = GAPS.encode(mask, None, LAYOUT)
    assert section is not None
    assert decode(section) == mask
    assert len(section) <= 1.04 * compute_selection_entropy(mask, None) + 16


def test_layers_of_different_density_have_widths_of_their_own() -> None:
    """One width for all would take 1.5 times the bytes."""
    mask = Mask(torch.cat([draw_mask(0.3, 2, SIZE // 2).bits, draw_mask(0.001, 3, SIZE // 2).bits]))
    section = GAPS.encode(mask, None, LAYOUT)
    assert section is not None
    assert decode(section) == mask
    parts = (Mask(part) for part in mask.bits.split(SIZE // 2))
    assert len(section) <= 1.05 * sum(compute_selection_entropy(part, None) for part in parts)


@pytest.mark.parametrize("values", ["float32", "bfloat16", "int2"])
@pytest.mark.parametrize("share", [1 / 30, 1 / 100, 1 / 300])
def test_entries_within_a_number_of_bytes_fill_it(share: float, values: str) -> None:
    allowed = share * 4 * SIZE

    def measure(count: int) -> int:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(1))
        mask = Mask.from_positions(order[:count].sort().values, SIZE)
        return HEADER_BYTES + len(choose_encoding(mask, None, LAYOUT)[1]) + FORMATS[values].compute_min_bytes(count)

    count = count_entries_within(allowed, SIZE, 0, FORMATS[values])
    assert measure(count) <= allowed < measure(round(1.05 * count))


def test_entries_within_too_few_and_enough_bytes() -> None:
    dense = HEADER_BYTES + 4 * SIZE
    assert [count_entries_within(n, SIZE, 0, FORMATS["float32"]) for n in (HEADER_BYTES, dense)] == [0, SIZE]


@pytest.mark.slow
@settings(max_examples=count_cases(200), deadline=None)
@given(data=st.data(), size=st.integers(0, 3000))
def test_any_selection_of_up_to_half_of_the_entries_comes_back(data: st.DataObject, size: int) -> None:
    layout = Layout((TensorSpec("w", (size,), "weight"),))
    indices = data.draw(st.sets(st.integers(0, size - 1), max_size=size // 2)) if size else set()
    bits = torch.zeros(size, dtype=torch.bool)
    bits[sorted(indices)] = True
    section = GAPS.encode(Mask(bits), None, layout)
    assert section is not None
    assert decode(section, layout) == Mask(bits)
    bound = GAPS.compute_min_bytes(Mask(bits), None, layout)
    assert bound is not None
    assert bound <= len(section)


@pytest.mark.parametrize("step", [2, 3, 4, 5, 8, 16, 1000])
def test_regular_selections_come_back(step: int) -> None:
    """Gaps just above a threshold of the width make the longest strings of bits that a sender writes."""
    regular = Mask(torch.arange(SIZE) % step == step - 1)
    section = GAPS.encode(regular, None, LAYOUT)
    assert section is not None
    assert decode(section) == regular


def test_denser_selections_are_left_to_the_bitmap() -> None:
    assert GAPS.encode(draw_mask(0.6), None, LAYOUT) is None
    assert GAPS.compute_min_bytes(draw_mask(0.6), None, LAYOUT) is None


def test_gaps_are_written_where_they_are_shorter_than_a_bitmap() -> None:
    mask = draw_mask(0.01)
    encoding, section = choose_encoding(mask, None, LAYOUT)
    bitmap = ENCODINGS["bitmap"].encode(mask, None, LAYOUT)
    assert encoding.name == "gaps"
    assert bitmap is not None
    assert len(section) < 0.65 * len(bitmap)


def with_count(count: int) -> Callable[[bytes], bytes]:
    return lambda section: count.to_bytes(8, "little") + section[8:]


def with_byte(offset: int, change: Callable[[int], int]) -> Callable[[bytes], bytes]:
    return lambda section: section[:offset] + bytes([change(section[offset])]) + section[offset:][1:]


SMALL = Layout((TensorSpec("w", (100,), "weight"),))
FEW = Mask(torch.tensor([index in (3, 20, 64, 99) for index in range(100)]))
# Gaps 3, 16, 43, 34: mean 24, width 4. Lowest bits 3, 0, 11, 2 in 2 bytes; quotients 0, 1, 2, 2, the bits
# 1 01 001 001, in 2 bytes.
SECTION = (4).to_bytes(8, "little") + bytes([4, 0x30, 0xB2, 0b10100100, 0b10000000])


def test_section_is_that_of_the_format_page() -> None:
    assert GAPS.encode(FEW, None, SMALL) == SECTION
    assert decode(SECTION, SMALL) == FEW


@pytest.mark.parametrize(
    ("forge", "code"),
    [
        (with_count(5), "E_LEN"),
        (with_count(3), "E_LEN"),
        (with_count(51), "E_SIZE"),
        (with_count(2**64 - 1), "E_SIZE"),
        (with_count(0), "E_LEN"),
        (with_byte(8, lambda width: 41), "E_LEN"),
        (with_byte(8, lambda width: 3), "E_LEN|E_CANON"),
        (with_byte(8, lambda width: 40), "E_LEN"),
        (lambda section: section + b"\0", "E_LEN"),
        (lambda section: section + b"\x80", "E_LEN"),
        (lambda section: section[:-1], "E_LEN"),
        (lambda section: section[:7], "E_LEN"),
        (lambda section: section[:8], "E_LEN"),
        (lambda section: section + bytes(10_000), "E_LEN"),
        # The last quotient is 3, not 2: position 115.
        (lambda section: section[:-1] + b"\x40", "E_INDEX"),
        # A quotient of 8: a gap above 128.
        (lambda section: section[:-2] + bytes([0b00000000, 0b10000000, 0b10010010]), "E_LEN|E_INDEX"),
    ],
)
def test_forged_sections_are_refused(forge: Callable[[bytes], bytes], code: str) -> None:
    with pytest.raises(RejectedMessage, match=code):
        decode(forge(SECTION), SMALL)


def build_section(count: int, width: int, bits: bytes) -> bytes:
    return count.to_bytes(8, "little") + bytes([width]) * -(-count // 256) + bits


@pytest.mark.parametrize(
    "section",
    [
        build_section(1000, 0, b"\xff" * (SIZE // 8)),
        build_section(1000, 0, b"\xff" * SIZE),
        build_section(1000, 0, bytes(SIZE)),
        build_section(SIZE // 2, 0, b""),
        build_section(SIZE // 2, 40, b""),
        build_section(SIZE // 2, 14, bytes(SIZE // 8 * 7) + b"\xff" * (SIZE // 16)),
    ],
    ids=["1 bits", "more 1 bits than entries", "0 bits", "no gaps", "no lowest bits", "wide gaps"],
)
def test_number_of_gaps_is_checked_before_anything_is_unpacked(section: bytes) -> None:
    received = np.frombuffer(section, np.uint8)
    tracemalloc.start()
    with pytest.raises(RejectedMessage, match="E_LEN"):
        GAPS.decode(received, None, LAYOUT)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The mask alone takes a byte for each entry.
    assert peak < SIZE


def test_another_width_of_a_block_is_not_canonical() -> None:
    """Gaps 3, 16, 43, 34 with the width 5: the same selection in other bytes."""
    low_bits = "".join(f"{gap % 32:05b}" for gap in (3, 16, 43, 34)).ljust(24, "0")
    quotients = "".join("0" * (gap // 32) + "1" for gap in (3, 16, 43, 34)).ljust(8, "0")
    body = int(low_bits + quotients, 2).to_bytes(4, "big")
    with pytest.raises(RejectedMessage, match="E_CANON"):
        decode((4).to_bytes(8, "little") + b"\x05" + body, SMALL)


@settings(max_examples=count_cases(300), deadline=None)
@given(section=st.binary(max_size=60), count=st.integers(0, 60))
def test_random_bytes_are_refused_or_the_one_form_of_a_selection(section: bytes, count: int) -> None:
    forged = count.to_bytes(8, "little") + section
    try:
        mask = decode(forged, SMALL)
    except RejectedMessage:
        return
    assert GAPS.encode(mask, None, SMALL) == forged
