"""A receiver trusts nothing: every malformed message is refused with a code, and never by another exception."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from flare_sparse.errors import MissingBase, RejectedMessage, WireError
from flare_sparse.exchange import Patch
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.wire import envelope
from flare_sparse.wire.codec import Decoded, decode, encode
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, read_header, write_header
from flare_sparse.wire.plan import Plan

LAYOUT = Layout((TensorSpec("w", (6, 5), "weight"), TensorSpec("b", (7,), "bias"), TensorSpec("s", (), "other")))
SIZE = LAYOUT.size
ON = Mask(torch.rand(SIZE, generator=torch.Generator().manual_seed(3)) < 0.4)
KNOWN = ON | Mask(torch.arange(SIZE) < 9)
RUN = "0123456789abcdef"
PLAN = Plan(LAYOUT, RUN, base_mask=KNOWN, base_sequence=4, sequence=7, round=3, kind="train")


def message(on: Mask = ON, known: Mask | None = KNOWN, **more: Any) -> np.ndarray:
    over = more.pop("base", "zeros")
    return encode(Patch.from_vector(torch.arange(1.0, SIZE + 1), on, over), replace(PLAN, base_mask=known), **more).data


def forced(name: str, raw: bytes | None = None, on: Mask = ON) -> np.ndarray:
    """A message whose selection is said by a given encoding, or by given bytes, with checksums that hold."""
    encoding = ENCODINGS[name]
    raw = encoding.encode(on, KNOWN, LAYOUT) if raw is None else raw
    assert raw is not None
    header = replace(
        read_header(message(on, None)),
        encoding=encoding.code,
        base_mask=bytes.fromhex(KNOWN.fingerprint) if encoding.requires_base else bytes(16),
        selection_bytes=len(raw),
    )
    buffer = np.zeros(header.values_start + -(-4 * on.count // 8) * 8, np.uint8)
    buffer[HEADER_BYTES : HEADER_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
    values = on.take(torch.arange(1.0, SIZE + 1)).numpy().view(np.uint8)
    buffer[header.values_start : header.values_start + values.size] = values
    write_header(header, buffer)
    return buffer


def tampered(**fields: Any) -> np.ndarray:
    """A message with other header fields and checksums that hold."""
    buffer = message().copy()
    header = replace(read_header(buffer), **fields)
    start = min(header.values_start, buffer.size)
    if start != read_header(buffer).values_start:
        return _sealed_unchecked(buffer, header)
    write_header(header, buffer)
    return buffer


def _sealed_unchecked(buffer: np.ndarray, header: Any) -> np.ndarray:
    """Lengths that do not fit: the checksum cannot be right, and need not be, since lengths are looked at first."""
    scratch = np.zeros(HEADER_BYTES, np.uint8)
    write_header(replace(header, selection_bytes=0, trainable_bytes=0), scratch)
    scratch[96:112] = np.frombuffer(
        np.array([header.selection_bytes, header.trainable_bytes], "<u8").tobytes(), np.uint8
    )
    buffer[:HEADER_BYTES] = scratch
    return buffer


def bitmap(bits: np.ndarray, flag: int = 0) -> bytes:
    return bytes([flag]) + np.packbits(bits).tobytes()


def csr(change: Callable[[np.ndarray], None]) -> bytes:
    numbers = np.frombuffer(ENCODINGS["csr"].encode(ON, None, LAYOUT) or b"", "<i4").copy()
    change(numbers)
    return numbers.astype("<i4").tobytes()


def _swap(numbers: np.ndarray) -> None:
    columns = numbers[11:]  # 6 + 1 row pointers of w, 1 + 1 each of b and s
    columns[:2] = columns[1::-1]


def _double(numbers: np.ndarray) -> None:
    numbers[12] = numbers[11]


def _far(numbers: np.ndarray) -> None:
    numbers[11] = 5


def _negative(numbers: np.ndarray) -> None:
    numbers[11] = -1


def _pointer(numbers: np.ndarray) -> None:
    numbers[6] = 2**30


WRONG_BITS = np.concatenate([ON.bits.numpy(), [True]])
FLIPPED = np.where(np.arange(SIZE) == 0, ~ON.bits.numpy(), ON.bits.numpy())

CASES: dict[str, tuple[str, np.ndarray]] = {
    "empty": ("E_LEN", np.zeros(0, np.uint8)),
    "short header": ("E_LEN", message()[:100]),
    "trailing bytes": ("E_CRC", np.concatenate([message(), np.ones(8, np.uint8)])),
    "trailing zero words": ("E_LEN", np.concatenate([message(), np.zeros(8, np.uint8)])),
    "unknown encoding": ("E_VERSION", tampered(encoding=99)),
    "unknown trainable encoding": ("E_VERSION", tampered(trainable=99)),
    "unknown value type": ("E_DTYPE", tampered(values=9)),
    "unknown content": ("E_VERSION", tampered(content=9)),
    "unknown over": ("E_VERSION", tampered(base=9)),
    "another run": ("E_RUN", tampered(run=bytes(8))),
    "another layout": ("E_LAYOUT", tampered(layout=bytes(16))),
    "another kind": ("E_KIND", tampered(kind="score")),
    "a kind that would write into a log": ("E_KIND", tampered(kind="a\nb")),
    "a kind with a hole": ("E_KIND", tampered(kind="a\0b")),
    "no kind": ("E_KIND", tampered(kind="")),
    "another round": ("E_ROUND", tampered(round=2)),
    "another question": ("E_REPLAY", tampered(sequence=6)),
    "more scalars than entries": ("E_SIZE", tampered(scalars=SIZE + 1)),
    "2**60 scalars": ("E_SIZE", tampered(scalars=2**60)),
    "one scalar more": ("E_NNZ", forced("bitmap", bitmap(FLIPPED))),
    "2**60 bytes of selection": ("E_LEN", tampered(selection_bytes=2**60)),
    "2**60 bytes of trainable": ("E_LEN", tampered(trainable_bytes=2**60)),
    "a base that is not needed": ("E_CANON", tampered(base_sequence=3)),
    "dense with a selection": ("E_LEN", forced("dense", b"x")),
    "padding bits set": ("E_CANON", forced("bitmap", bitmap(WRONG_BITS))),
    "unknown bitmap flag": ("E_CANON", forced("bitmap", bitmap(ON.bits.numpy(), flag=7))),
    "bitmap too short": ("E_LEN", forced("bitmap", bitmap(ON.bits.numpy())[:-1])),
    "bitmap without a byte": ("E_LEN", forced("bitmap", b"")),
    "zstd of another size": ("E_SIZE", forced("bitmap", b"\1" + zstandard.compress(bytes(10_000_000)))),
    "zstd that is none": ("E_LEN", forced("bitmap", b"\1garbage")),
    "csr unsorted": ("E_INDEX", forced("csr", csr(_swap))),
    "csr duplicate": ("E_INDEX", forced("csr", csr(_double))),
    "csr out of range": ("E_INDEX", forced("csr", csr(_far))),
    "csr negative": ("E_INDEX", forced("csr", csr(_negative))),
    "csr pointer too large": ("E_INDEX", forced("csr", csr(_pointer))),
    "csr truncated": ("E_LEN", forced("csr", csr(_swap)[:8])),
    "csr trailing": ("E_LEN", forced("csr", csr(lambda _: None) + bytes(4))),
    "slices of unknown mode": ("E_CANON", forced("slices", b"\7\0\0")),
    "slices out of range": ("E_INDEX", forced("slices", b"\2\1\0\0\0\6\0\0\0\0\0")),
    "slices unsorted": ("E_INDEX", forced("slices", b"\2\2\0\0\0\1\0\0\0\1\0\0\0\0\0")),
    "slices that are all": ("E_LEN", forced("slices", b"\2\6\0\0\0" + bytes(26))),
    "slices cut off": ("E_LEN", forced("slices", b"\2\1\0")),
    "slices trailing": ("E_LEN", forced("slices", b"\0\0\0\0")),
}


@pytest.mark.parametrize("name", CASES)
def test_each_malformed_field_has_its_code(name: str) -> None:
    code, data = CASES[name]
    with pytest.raises(RejectedMessage) as caught:
        decode(data, PLAN, "site-3")
    assert (caught.value.code, caught.value.site) == (code, "site-3")
    assert all(word in str(caught.value) for word in (code, "site-3", "expected", "found"))


@pytest.mark.parametrize(("at", "byte"), [(0, b"X"), (4, b"\2"), (5, b"\1")])
def test_magic_and_version(at: int, byte: bytes) -> None:
    data = message().copy()
    data[at] = byte[0]
    with pytest.raises(RejectedMessage, match="E_VERSION"):
        decode(data, PLAN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_must_be_finite_at_both_ends(value: float) -> None:
    data = message().copy()
    header = read_header(data)
    data[header.values_start : header.values_start + 4] = np.array([value], "<f4").view(np.uint8)
    write_header(header, data)
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        decode(data, PLAN)
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        encode(Patch(torch.full((ON.count,), value), ON), PLAN)


def test_a_value_that_overflows_the_short_format_is_not_sent_and_large_finite_ones_are_fine() -> None:
    large = torch.full((ON.count,), 3e38)
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        encode(Patch(large, ON), PLAN, values="float16")
    assert torch.equal(decode(encode(Patch(large, ON), PLAN).data, PLAN).patch.values, large)


def test_what_is_not_held_is_asked_for_and_not_guessed() -> None:
    leaning = message(KNOWN, KNOWN)
    assert decode(leaning, PLAN).encoding == "shared"
    for known in (None, ON):
        with pytest.raises(MissingBase, match="mask"):
            decode(leaning, replace(PLAN, base_mask=known))
    patch = message(base="previous")
    assert decode(patch, PLAN).patch.base == "previous"
    for base in (None, 3):
        with pytest.raises(MissingBase, match="base"):
            decode(patch, replace(PLAN, base_sequence=base))


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
def test_a_buffer_of_another_form(data: Any) -> None:
    with pytest.raises(RejectedMessage, match="E_DTYPE"):
        decode(data, PLAN)


SAMPLES = {name: forced(name) for name in ("shrink", "bitmap", "csr")}
SAMPLES["shared"] = message(KNOWN)
SAMPLES["dense"] = message(Mask.full(SIZE), trainable=ON)
SAMPLES["slices"] = message(Mask(LAYOUT.select(lambda entry: entry.name == "b")), None, trainable=ON, values="bfloat16")


@pytest.mark.parametrize("name", SAMPLES)
def test_mutations_with_checksums_that_hold_are_refused_or_harmless(name: str) -> None:
    """A forger can make checksums right; what then passes is a patch within the layout, finite, and nothing else."""
    draw = random.Random(name)
    for _ in range(1500):
        data = SAMPLES[name].copy()
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(6, data.size)] = draw.choice([0, 1, 255, draw.randrange(256)])
        fields = np.frombuffer(data[96:112].tobytes(), "<u8")
        if fields.sum() < data.size - HEADER_BYTES:
            _reseal(data)
        _harmless(data)


def _reseal(data: np.ndarray) -> None:
    start = -(-(HEADER_BYTES + int(np.frombuffer(data[96:112].tobytes(), "<u8").sum())) // 8) * 8
    if start <= data.size and not (data.size - start) % 8:
        data[112:128] = np.frombuffer(envelope._CHECKS.pack(*envelope._checksums(data, start)), np.uint8)


def _harmless(data: np.ndarray) -> None:
    try:
        decoded: Decoded = decode(data, PLAN)
    except WireError:
        return
    patch = decoded.patch
    assert patch.mask.size == SIZE
    assert patch.values.shape == (patch.mask.count,)
    assert torch.isfinite(patch.values).all()


@pytest.mark.parametrize("block", [8, 64, 4096, 2**20])
def test_blocks_that_changed_places_are_found(block: int) -> None:
    """A sum alone would not see it, and transports cut messages into blocks."""
    layout = Layout((TensorSpec("w", (1000, 700), "weight"),))
    plan = replace(PLAN, layout=layout, base_mask=None)
    data = encode(Patch(torch.arange(700_000.0), Mask.full(layout.size)), plan).data
    swapped = data.copy()
    first, second = HEADER_BYTES, HEADER_BYTES + block
    swapped[first:second], swapped[second : second + block] = data[second : second + block], data[first:second]
    with pytest.raises(RejectedMessage, match="E_CRC"):
        decode(swapped, plan)


@pytest.mark.parametrize(
    ("patch", "plan", "names"),
    [
        (Patch(torch.ones(3), ON), PLAN, "patch.source"),
        (Patch(torch.ones(ON.count, 1), ON), PLAN, "patch.source"),
        (Patch(torch.ones(4), Mask.full(4)), PLAN, "patch.mask"),
        (Patch(torch.ones(SIZE), ON, "previous"), replace(PLAN, base_sequence=None), "plan.base_sequence"),
        (Patch(torch.ones(SIZE), ON), replace(PLAN, sequence=None), "sequence"),
        (Patch(torch.ones(SIZE), ON), replace(PLAN, kind=""), "kind"),
        (Patch(torch.ones(SIZE), ON), replace(PLAN, kind="a" * 17), "kind"),
        (Patch(torch.ones(SIZE), ON), replace(PLAN, kind="tra\nin"), "kind"),
    ],
)
def test_a_sender_does_not_send_what_would_be_misread(patch: Patch, plan: Plan, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        encode(patch, plan)


@pytest.mark.parametrize("run", ["", "0123", "0123456789ABCDEF", "0123456789abcdeg"])
def test_a_run_is_sixteen_hex_digits(run: str) -> None:
    with pytest.raises(ValueError, match="16 lower-case hex digits"):
        Plan(LAYOUT, run)


def test_claims_do_not_allocate() -> None:
    tracemalloc.start()
    for name in ("2**60 scalars", "2**60 bytes of selection", "zstd of another size"):
        with pytest.raises(RejectedMessage):
            decode(CASES[name][1], PLAN)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000
