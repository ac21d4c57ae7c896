"""The decoder refuses every malformed message with a code and raises no other exception."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from flare_sparse.core.errors import MissingBase, RejectedMessage, WireError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import Decoded, decode, encode
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, VERSION, read_header, write_checksums, write_header
from flare_sparse.wire.plan import NO_NAME, Plan

LAYOUT = Layout((TensorSpec("w", (6, 5), "weight"), TensorSpec("b", (7,), "bias"), TensorSpec("s", (), "other")))
SIZE = LAYOUT.size
MASK = Mask(torch.rand(SIZE, generator=torch.Generator().manual_seed(3)) < 0.4)
BASE_MASK = MASK | Mask(torch.arange(SIZE) < 9)
RUN = "0123456789abcdef"
PLAN = Plan(
    LAYOUT,
    RUN,
    base="4" * 16,
    base_mask=BASE_MASK,
    target="7" * 16,
    request="9" * 16,
    sequence=7,
    round=3,
    kind="train",
)


def build_message(mask: Mask = MASK, base_mask: Mask | None = BASE_MASK, **options: Any) -> np.ndarray:
    base = options.pop("base", "zeros")
    patch = Patch.from_vector(torch.arange(1.0, SIZE + 1), mask, base)
    return encode(patch, replace(PLAN, base_mask=base_mask), **options).data


def force_encoding(name: str, section: bytes | None = None, mask: Mask = MASK) -> np.ndarray:
    """Return a message with valid checksums whose selection is written by this encoding, or is ``section``."""
    encoding = ENCODINGS[name]
    section = encoding.encode(mask, BASE_MASK, LAYOUT) if section is None else section
    assert section is not None
    header = replace(
        read_header(build_message(mask, None)),
        encoding=encoding.code,
        base="4" * 16 if encoding.requires_base else NO_NAME,
        selection_bytes=len(section),
    )
    buffer = np.zeros(header.values_start + -(-4 * mask.count // 8) * 8, np.uint8)
    buffer[HEADER_BYTES : HEADER_BYTES + len(section)] = np.frombuffer(section, np.uint8)
    values = mask.take(torch.arange(1.0, SIZE + 1)).numpy().view(np.uint8)
    buffer[header.values_start : header.values_start + values.size] = values
    write_header(header, buffer)
    return buffer


def change_header(message: np.ndarray | None = None, **fields: Any) -> np.ndarray:
    """Return a message with other header fields and valid checksums."""
    buffer = (build_message() if message is None else message).copy()
    header = replace(read_header(buffer), **fields)
    start = min(header.values_start, buffer.size)
    if start != read_header(buffer).values_start:
        return _write_wrong_lengths(buffer, header)
    write_header(header, buffer)
    return buffer


def _write_wrong_lengths(buffer: np.ndarray, header: Any) -> np.ndarray:
    """Write section lengths that exceed the message. No checksum can be valid, but lengths are checked first."""
    scratch = np.zeros(HEADER_BYTES, np.uint8)
    write_header(replace(header, selection_bytes=0, trainable_bytes=0), scratch)
    scratch[96:112] = np.frombuffer(
        np.array([header.selection_bytes, header.trainable_bytes], "<u8").tobytes(), np.uint8
    )
    buffer[:HEADER_BYTES] = scratch
    return buffer


def build_bitmap(bits: np.ndarray, flag: int = 0) -> bytes:
    return bytes([flag]) + np.packbits(bits).tobytes()


WRONG_BITS = np.concatenate([MASK.bits.numpy(), [True]])
FLIPPED = np.where(np.arange(SIZE) == 0, ~MASK.bits.numpy(), MASK.bits.numpy())

CASES: dict[str, tuple[str, np.ndarray]] = {
    "empty": ("E_LEN", np.zeros(0, np.uint8)),
    "short header": ("E_LEN", build_message()[:100]),
    "trailing bytes": ("E_CRC", np.concatenate([build_message(), np.ones(8, np.uint8)])),
    "trailing zero words": ("E_LEN", np.concatenate([build_message(), np.zeros(8, np.uint8)])),
    "unknown encoding": ("E_VERSION", change_header(encoding=99)),
    "unknown trainable encoding": ("E_VERSION", change_header(trainable=99)),
    "unknown value type": ("E_DTYPE", change_header(values=99)),
    "unknown content": ("E_VERSION", change_header(content=9)),
    "unknown base": ("E_VERSION", change_header(patch_base=9)),
    "another run": ("E_RUN", change_header(run=bytes(8))),
    "another layout": ("E_LAYOUT", change_header(layout=bytes(16))),
    "another kind": ("E_KIND", change_header(kind="score")),
    "a kind that would write into a log": ("E_KIND", change_header(kind="a\nb")),
    "a kind with a hole": ("E_KIND", change_header(kind="a\0b")),
    "no kind": ("E_KIND", change_header(kind="")),
    "another round": ("E_ROUND", change_header(round=2)),
    "another attempt": ("E_REPLAY", change_header(sequence=6)),
    "another request": ("E_REPLAY", change_header(request="8" * 16)),
    "another target": ("E_REPLAY", change_header(target="8" * 16)),
    "more scalars than entries": ("E_SIZE", change_header(scalars=SIZE + 1)),
    "2**60 scalars": ("E_SIZE", change_header(scalars=2**60)),
    "one scalar more": ("E_NNZ", force_encoding("bitmap", build_bitmap(FLIPPED))),
    "2**60 bytes of selection": ("E_LEN", change_header(selection_bytes=2**60)),
    "2**60 bytes of trainable": ("E_LEN", change_header(trainable_bytes=2**60)),
    "a base that is not needed": ("E_CANON", change_header(build_message(MASK, None), base="3" * 16)),
    "dense with a selection": ("E_LEN", force_encoding("dense", b"x")),
    "padding bits set": ("E_CANON", force_encoding("bitmap", build_bitmap(WRONG_BITS))),
    "unknown bitmap flag": ("E_CANON", force_encoding("bitmap", build_bitmap(MASK.bits.numpy(), flag=7))),
    "bitmap too short": ("E_LEN", force_encoding("bitmap", build_bitmap(MASK.bits.numpy())[:-1])),
    "bitmap without a byte": ("E_LEN", force_encoding("bitmap", b"")),
    "zstd of another size": ("E_SIZE", force_encoding("bitmap", b"\1" + zstandard.compress(bytes(10_000_000)))),
    "zstd that is none": ("E_LEN", force_encoding("bitmap", b"\1garbage")),
    "slices of unknown mode": ("E_CANON", force_encoding("slices", b"\7\0\0")),
    "slices out of range": ("E_INDEX", force_encoding("slices", b"\2\1\0\0\0\6\0\0\0\0\0")),
    "slices unsorted": ("E_INDEX", force_encoding("slices", b"\2\2\0\0\0\1\0\0\0\1\0\0\0\0\0")),
    "slices that are all": ("E_LEN", force_encoding("slices", b"\2\6\0\0\0" + bytes(26))),
    "slices cut off": ("E_LEN", force_encoding("slices", b"\2\1\0")),
    "slices trailing": ("E_LEN", force_encoding("slices", b"\0\0\0\0")),
}


@pytest.mark.parametrize("name", CASES)
def test_malformed_field_is_refused_with_its_code(name: str) -> None:
    code, data = CASES[name]
    with pytest.raises(RejectedMessage) as caught:
        decode(data, PLAN, "site-3")
    assert (caught.value.code, caught.value.site) == (code, "site-3")
    assert all(word in str(caught.value) for word in (code, "site-3", "expected", "found"))


@pytest.mark.parametrize("is_request", [True, False])
def test_message_of_the_other_direction_is_named_as_such_before_its_base(is_request: bool) -> None:
    """A site that reports a missing base receives the whole model; a message that it reflects is no reason for that."""
    message = force_encoding("shared", mask=BASE_MASK) if is_request else build_message(BASE_MASK, trainable=MASK)
    assert read_header(message).base == PLAN.base
    assert (decode(message, PLAN).trainable is None) == is_request
    for plan in (PLAN, replace(PLAN, base=None, base_mask=None)):
        with pytest.raises(RejectedMessage, match=r"E_KIND.*trainable"):
            decode(message, replace(plan, is_request=is_request))


@pytest.mark.parametrize(("at", "byte"), [(0, b"X"), (4, bytes([VERSION + 1])), (5, b"\1")])
def test_other_magic_or_version_is_refused(at: int, byte: bytes) -> None:
    data = build_message().copy()
    data[at] = byte[0]
    with pytest.raises(RejectedMessage, match="E_VERSION"):
        decode(data, PLAN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused_by_decoder_and_encoder(value: float) -> None:
    data = build_message().copy()
    header = read_header(data)
    data[header.values_start : header.values_start + 4] = np.array([value], "<f4").view(np.uint8)
    write_header(header, data)
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        decode(data, PLAN)
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        encode(Patch(torch.full((MASK.count,), value), MASK), PLAN)


def test_overflow_of_float16_is_refused_and_large_float32_is_sent() -> None:
    large = torch.full((MASK.count,), 3e38)
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        encode(Patch(large, MASK), PLAN, values="float16")
    assert torch.equal(decode(encode(Patch(large, MASK), PLAN).data, PLAN).patch.values, large)


def test_reference_to_a_mask_or_base_not_held_raises_missing_base() -> None:
    data = build_message(BASE_MASK, BASE_MASK)
    assert decode(data, PLAN).encoding == "shared"
    for other in (replace(PLAN, base_mask=None), replace(PLAN, base="3" * 16)):
        with pytest.raises(MissingBase, match="base"):
            decode(data, other)
    data = build_message(base="previous")
    assert decode(data, PLAN).patch.base == "previous"
    for base in (None, "3" * 16):
        with pytest.raises(MissingBase, match="base"):
            decode(data, replace(PLAN, base=base))


@pytest.mark.parametrize(
    "data",
    [
        np.zeros((4, 40), np.uint8),
        np.zeros(200, np.float32),
        np.full(3, None),
        memoryview(bytes(512))[::2],
        "FSPM",
        None,
    ],
    ids=lambda data: type(data).__name__,
)
def test_buffer_that_is_not_contiguous_bytes_is_refused(data: Any) -> None:
    with pytest.raises(RejectedMessage, match="E_DTYPE"):
        decode(data, PLAN)


SAMPLES = {name: force_encoding(name) for name in ("shrink", "bitmap")}
SAMPLES["shared"] = build_message(BASE_MASK)
SAMPLES["dense"] = build_message(Mask.full(SIZE), trainable=MASK)
SAMPLES["slices"] = build_message(
    Mask(LAYOUT.select(lambda entry: entry.name == "b")), None, trainable=MASK, values="bfloat16"
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLES)
def test_forged_mutation_is_refused_or_decodes_to_a_valid_patch(name: str) -> None:
    """With valid checksums, a message that is not refused still yields a finite patch within the layout."""
    rng = random.Random(name)
    for _ in range(1500):
        data = SAMPLES[name].copy()
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(6, data.size)] = rng.choice([0, 1, 255, rng.randrange(256)])
        lengths = np.frombuffer(data[96:112].tobytes(), "<u8")
        if lengths.sum() < data.size - HEADER_BYTES:
            _fix_checksums(data)
        _check_refused_or_valid(data)


def _fix_checksums(data: np.ndarray) -> None:
    start = -(-(HEADER_BYTES + int(np.frombuffer(data[96:112].tobytes(), "<u8").sum())) // 8) * 8
    if start <= data.size and not (data.size - start) % 8:
        write_checksums(data, start)


def _check_refused_or_valid(data: np.ndarray) -> None:
    try:
        decoded: Decoded = decode(data, PLAN)
    except WireError:
        return
    patch = decoded.patch
    assert patch.mask.size == SIZE
    assert patch.values.shape == (patch.mask.count,)
    assert torch.isfinite(patch.values).all()


@pytest.mark.parametrize("block", [8, 64, 4096, 2**20])
def test_checksum_detects_two_swapped_blocks(block: int) -> None:
    """Transports send messages in blocks, and a plain sum does not depend on their order."""
    layout = Layout((TensorSpec("w", (1000, 700), "weight"),))
    plan = replace(PLAN, layout=layout, base_mask=None)
    data = encode(Patch(torch.arange(700_000.0), Mask.full(layout.size)), plan).data
    swapped = data.copy()
    first, second = HEADER_BYTES, HEADER_BYTES + block
    swapped[first:second], swapped[second : second + block] = data[second : second + block], data[first:second]
    with pytest.raises(RejectedMessage, match="E_CRC"):
        decode(swapped, plan)


@pytest.mark.parametrize(
    ("patch", "plan", "field"),
    [
        (Patch(torch.ones(3), MASK), PLAN, "patch.source"),
        (Patch(torch.ones(MASK.count, 1), MASK), PLAN, "patch.source"),
        (Patch(torch.ones(4), Mask.full(4)), PLAN, "patch.mask"),
        (Patch(torch.ones(SIZE), MASK, "previous"), replace(PLAN, base=None), "plan.base"),
        (Patch(torch.ones(SIZE), MASK), replace(PLAN, sequence=None), "sequence"),
        (Patch(torch.ones(SIZE), MASK), replace(PLAN, kind=""), "kind"),
        (Patch(torch.ones(SIZE), MASK), replace(PLAN, kind="a" * 17), "kind"),
        (Patch(torch.ones(SIZE), MASK), replace(PLAN, kind="tra\nin"), "kind"),
    ],
)
def test_encode_refuses_incomplete_plan_or_patch_of_another_layout(patch: Patch, plan: Plan, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        encode(patch, plan)


@pytest.mark.parametrize("run", ["", "0123", "0123456789ABCDEF", "0123456789abcdeg"])
def test_plan_refuses_run_that_is_not_sixteen_hex_digits(run: str) -> None:
    with pytest.raises(ValueError, match="16 lower-case hex digits"):
        Plan(LAYOUT, run)


def test_claimed_sizes_are_refused_without_allocation() -> None:
    tracemalloc.start()
    for name in ("2**60 scalars", "2**60 bytes of selection", "zstd of another size"):
        with pytest.raises(RejectedMessage):
            decode(CASES[name][1], PLAN)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000


def test_message_longer_than_any_of_the_model_is_refused_unread() -> None:
    with pytest.raises(RejectedMessage, match="E_LEN") as error:
        decode(np.zeros(2**24, np.uint8), PLAN)
    assert error.value.found == 2**24
