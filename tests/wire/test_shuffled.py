"""Compressed float values: the same bits, at most 8 bytes a column more than plain, bounded before decompression."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import compute_min_message_bytes, decode, encode
from flare_sparse.wire.envelope import read_header, round_up_to_words, write_header
from flare_sparse.wire.formats import ValueType
from flare_sparse.wire.plan import Plan

FORMATS: list[tuple[ValueType, ValueType]] = [("float32_zstd", "float32"), ("bfloat16_zstd", "bfloat16")]
NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**126), max_value=2.0**126)
SIZE = 4000
WEIGHTS = torch.randn(SIZE, generator=torch.Generator().manual_seed(1)) / 30


def build_plan(size: int) -> Plan:
    layout = Layout((TensorSpec("w", (size,), "weight"),))
    return Plan(layout, "0" * 16, target="7" * 16, request="9" * 16, sequence=7, round=3, kind="train")


def write(vector: torch.Tensor, values: ValueType, **options: torch.Tensor) -> np.ndarray:
    patch = Patch.from_vector(vector, Mask.full(vector.numel()))
    return encode(patch, build_plan(vector.numel()), values=values, **options).data  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("values", "plain"), FORMATS)
@settings(max_examples=count_cases(60), deadline=None)
@given(numbers=st.lists(NUMBERS, max_size=60) | st.integers(0, 300).map(lambda n: [1.5] * n))
def test_values_are_those_of_the_plain_format(values: ValueType, plain: ValueType, numbers: list[float]) -> None:
    vector = torch.tensor(numbers, dtype=torch.float32)
    plan, data = build_plan(vector.numel()), write(vector, values)
    back, expected = (decode(message, plan).patch.values for message in (data, write(vector, plain)))
    assert back.view(torch.int32).tolist() == expected.view(torch.int32).tolist()
    # A column that does not shrink travels as it is.
    assert compute_min_message_bytes(vector.numel(), values) <= data.size <= 8 * 4 + write(vector, plain).size


@pytest.mark.parametrize(("values", "share"), [("float32_zstd", 0.86), ("bfloat16_zstd", 0.72)])
def test_weights_take_fewer_bytes(values: ValueType, share: float) -> None:
    plain = {"float32_zstd": 4, "bfloat16_zstd": 2}[values] * SIZE
    assert write(WEIGHTS, values).size < share * plain + 136
    assert write(WEIGHTS, values).tobytes() == write(WEIGHTS, values).tobytes()


def test_bfloat16_keeps_its_error_feedback() -> None:
    patch, plan = Patch.from_vector(WEIGHTS, Mask.full(SIZE)), build_plan(SIZE)
    before = torch.full((SIZE,), 1e-4)
    short, compressed = (
        encode(patch, plan, values=values, residual=before).residual for values in ("bfloat16", "bfloat16_zstd")
    )
    assert short is not None
    assert compressed is not None
    assert torch.equal(short, compressed)


def forge(section: bytes, size: int = SIZE) -> np.ndarray:
    """Return a message of ``size`` values with another values section and valid checksums."""
    header = read_header(write(WEIGHTS[:size], "float32_zstd"))
    buffer = np.zeros(header.values_start + round_up_to_words(len(section)), np.uint8)
    buffer[header.values_start : header.values_start + len(section)] = np.frombuffer(section, np.uint8)
    write_header(header, buffer)
    return buffer


def with_lengths(*columns: bytes) -> bytes:
    """Return a section of these columns; those that are missing are plain zeros."""
    columns += (bytes(SIZE),) * (4 - len(columns))
    return np.array([len(column) for column in columns], "<u8").tobytes() + b"".join(columns)


COMPRESSOR = zstandard.ZstdCompressor(level=3)


@pytest.mark.parametrize(
    ("section", "code"),
    [
        (with_lengths(COMPRESSOR.compress(bytes(SIZE + 1))), "E_SIZE"),
        (with_lengths(COMPRESSOR.compress(bytes(2**24))), "E_SIZE"),
        (with_lengths(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(SIZE))), "E_SIZE"),
        (with_lengths(COMPRESSOR.compress(bytes(SIZE)) + b"\0"), "E_LEN"),
        (with_lengths(COMPRESSOR.compress(bytes(SIZE))[:-1]), "E_LEN"),
        (with_lengths(b"not a frame"), "E_LEN"),
        (with_lengths(b""), "E_LEN"),
        (with_lengths(bytes(SIZE + 1)), "E_SIZE"),
        (b"\xff" * 32, "E_SIZE"),
        (b"\xff" * 24, "E_LEN"),
        (with_lengths()[:-8], "E_LEN"),
        (b"", "E_LEN"),
        # Rotated, 0xff000000 is infinity.
        (with_lengths(bytes(SIZE), bytes(SIZE), bytes(SIZE), b"\xff" * SIZE), "E_FINITE"),
        (with_lengths(bytes(SIZE), bytes(SIZE), bytes(SIZE), COMPRESSOR.compress(b"\xff" * SIZE)), "E_FINITE"),
    ],
)
def test_forged_sections_are_refused(section: bytes, code: str) -> None:
    with pytest.raises(RejectedMessage, match=code):
        decode(forge(section), build_plan(SIZE))


def test_padding_after_the_section_is_zero() -> None:
    section = np.array([3] * 4, "<u8").tobytes() + bytes(12)
    assert decode(forge(section, 3), build_plan(3)).patch.values.tolist() == [0, 0, 0]
    with pytest.raises(RejectedMessage, match="E_CANON"):
        decode(forge(section + b"\1", 3), build_plan(3))
