"""Old versions stay readable beside a next one, a toy of this test with another header and one more encoding."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from golden import FILES, check_meaning

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire import codec
from flare_sparse.wire.codec import compute_min_message_bytes, decode, encode, read_sequences
from flare_sparse.wire.encodings import ENCODINGS, Encoding
from flare_sparse.wire.envelope import HEADER_BYTES, MAGIC, Header, read_header, write_header
from flare_sparse.wire.plan import Plan
from flare_sparse.wire.versions import VERSIONS, WireVersion

LAYOUT = Layout((TensorSpec("w", (40, 50), "weight"), TensorSpec("b", (7,), "bias")))
PLAN = Plan(LAYOUT, "0123456789abcdef", base_sequence=4, sequence=7, round=3, kind="train")
VECTOR = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(8))
RUN = Mask((torch.arange(LAYOUT.size) >= 700) & (torch.arange(LAYOUT.size) < 1500))


class OneRun(Encoding):
    """A toy encoding: one run of consecutive entries, as its start and length (uint32 each)."""

    name, code = "one_run", 200

    def compute_min_bytes(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> int | None:
        return 8

    def encode(self, mask: Mask, base_mask: Mask | None, layout: Layout) -> bytes | None:
        indices = mask.indices.numpy()
        if not indices.size or indices[-1] - indices[0] + 1 != indices.size:
            return None
        return struct.pack("<II", indices[0], indices.size)

    def decode(self, section: np.ndarray, base_mask: Mask | None, layout: Layout) -> Mask:
        if section.size != 8:
            raise RejectedMessage("E_LEN", "selection", "8 bytes", section.size)
        start, length = struct.unpack("<II", section.tobytes())
        if not 0 < length <= layout.size - start:
            raise RejectedMessage("E_INDEX", "selection", f"a run within {layout.size} entries", (start, length))
        position = torch.arange(layout.size)
        return Mask((position >= start) & (position < start + length))


NEXT = max(VERSIONS) + 1
# Another order of the fields, and one checksum after all of them: 136 bytes.
TOY_FIELDS = struct.Struct("<4sHQQI16s8s16s16sQQQBBBBB21xI")
TOY_ORDER = (
    "sequence", "base_sequence", "round", "kind", "run", "layout", "base_mask", "scalars", "selection_bytes",
    "trainable_bytes", "encoding", "trainable", "values", "content", "base",
)  # fmt: skip


def write_toy_header(header: Header, buffer: np.ndarray) -> None:
    fields = [getattr(header, name) for name in TOY_ORDER]
    fields[3] = header.kind.encode("ascii")
    buffer[: TOY_FIELDS.size] = np.frombuffer(TOY_FIELDS.pack(MAGIC, header.version, *fields, 0), np.uint8)
    buffer[TOY_FIELDS.size - 4 : TOY_FIELDS.size] = np.frombuffer(struct.pack("<I", compute_crc(buffer)), np.uint8)


def read_toy_header(buffer: np.ndarray) -> Header:
    if buffer.size < TOY_FIELDS.size:
        raise RejectedMessage("E_LEN", "message", f"at least {TOY_FIELDS.size} bytes", buffer.size)
    _, version, *fields, crc = TOY_FIELDS.unpack(buffer[: TOY_FIELDS.size].tobytes())
    if crc != compute_crc(buffer):
        raise RejectedMessage("E_CRC", "checksum", "the checksum of the content", "another one")
    by_name: dict[str, Any] = dict(zip(TOY_ORDER, fields, strict=True))
    by_name["kind"] = by_name["kind"].rstrip(b"\0").decode("ascii")
    return Header(version=version, header_bytes=TOY_FIELDS.size, **by_name)


def compute_crc(buffer: np.ndarray) -> int:
    return zlib.crc32(buffer[TOY_FIELDS.size :].tobytes(), zlib.crc32(buffer[: TOY_FIELDS.size - 4].tobytes()))


TOY = WireVersion(
    NEXT,
    (*VERSIONS[1].encodings, OneRun()),
    VERSIONS[1].value_formats,
    TOY_FIELDS.size,
    read_toy_header,
    write_toy_header,
)


@contextmanager
def register_toy() -> Iterator[None]:
    """Within this context, the package also reads the next version, and writes it."""
    with patch.dict(VERSIONS, {NEXT: TOY}), patch.object(codec, "choose_version", lambda value_format: TOY):
        yield


def build_next_message() -> np.ndarray:
    with register_toy():
        return encode(Patch.from_vector(VECTOR, RUN), PLAN).data


def build_v1_message_with_code(code: int, section: bytes, **fields: int) -> np.ndarray:
    """Return a version 1 message with valid checksums whose selection has this code and these bytes."""
    plain = encode(Patch.from_vector(VECTOR, RUN), PLAN).data
    header = read_header(plain)
    values = plain[header.values_start :]
    header = replace(header, encoding=code, selection_bytes=len(section), **fields)
    buffer = np.zeros(header.values_start + values.size, np.uint8)
    buffer[HEADER_BYTES : HEADER_BYTES + len(section)] = np.frombuffer(section, np.uint8)
    buffer[header.values_start :] = values
    write_header(header, buffer)
    return buffer


@pytest.mark.parametrize("file", FILES)
def test_golden_message_keeps_its_meaning_when_the_next_version_is_current(file: str) -> None:
    with register_toy():
        check_meaning(file)


def test_next_version_decodes_its_own_header_and_encoding_to_the_same_patch() -> None:
    with register_toy():
        message = encode(Patch.from_vector(VECTOR, RUN, "previous"), PLAN, trainable=RUN)
        decoded = decode(message.data, PLAN)
        assert read_sequences(message.data)[0] == 7
        assert message.payload_bytes == compute_min_message_bytes(RUN.count, "float32") + 8
    assert message.encoding == decoded.encoding == "one_run"
    assert bytes(message.data[:6]) == b"FSPM" + struct.pack("<H", NEXT)
    assert (decoded.patch.mask, decoded.trainable, decoded.patch.base) == (RUN, RUN, "previous")
    assert torch.equal(decoded.patch.values, RUN.take(VECTOR))
    assert (decoded.kind, decoded.round, decoded.sequence) == ("train", 3, 7)


def test_next_version_uses_the_encodings_of_v1_as_well() -> None:
    mask = Mask(torch.rand(LAYOUT.size, generator=torch.Generator().manual_seed(9)) < 0.3)
    with register_toy():
        message = encode(Patch.from_vector(VECTOR, mask), PLAN)
        decoded = decode(message.data, PLAN)
    assert (message.encoding, decoded.patch.mask) == ("bitmap", mask)


def test_damaged_message_is_refused_by_the_header_reader_of_its_version() -> None:
    data = build_next_message()
    data[-1] ^= 1
    with register_toy(), pytest.raises(RejectedMessage, match="E_CRC"):
        decode(data, PLAN)


def test_v1_message_with_an_encoding_of_the_next_version_is_refused() -> None:
    section = OneRun().encode(RUN, None, LAYOUT)
    assert section is not None
    as_selection = build_v1_message_with_code(OneRun.code, section)
    bitmap = ENCODINGS["bitmap"]
    as_trainable = build_v1_message_with_code(
        bitmap.code, bitmap.encode(RUN, None, LAYOUT) or b"", trainable=OneRun.code
    )
    for message, field in ((as_selection, "encoding"), (as_trainable, "trainable encoding")):
        with register_toy(), pytest.raises(RejectedMessage, match=f"E_VERSION.*, {field}: expected") as caught:
            decode(message, PLAN)
        assert caught.value.expected == [1, 2, 3, 4, 5, 6]


def test_peer_without_the_next_version_refuses_its_messages() -> None:
    data = build_next_message()
    for read in (lambda: decode(data, PLAN), lambda: read_sequences(data)):
        with pytest.raises(RejectedMessage, match="E_VERSION") as caught:
            read()
        assert (caught.value.expected, caught.value.found) == ((b"FSPM", sorted(VERSIONS)), (b"FSPM", NEXT))


@pytest.mark.parametrize(("values", "number"), [("float32", 1), ("bfloat16", 1), ("int4", 2), ("float32_zstd", 2)])
def test_encoder_writes_the_oldest_version_that_has_the_value_format(values: Any, number: int) -> None:
    """So that a job without the formats of version 2 sends the bytes of version 1."""
    data = encode(Patch.from_vector(VECTOR, RUN), PLAN, values=values, generator=torch.Generator()).data
    assert int.from_bytes(data[4:6].tobytes(), "little") == number


@pytest.mark.parametrize(("number", "code"), [(1, 5), (1, 6), (1, 7), (1, 8), (1, 9), (2, 1), (2, 2), (2, 3), (2, 4)])
def test_value_format_of_another_version_is_refused(number: int, code: int) -> None:
    values: Any = {1: "float32", 2: "int8"}[number]
    data = encode(Patch.from_vector(VECTOR, RUN), PLAN, values=values, generator=torch.Generator()).data
    write_header(replace(read_header(data), values=code), data)
    with pytest.raises(RejectedMessage, match="E_DTYPE"):
        decode(data, PLAN)


def test_v1_has_its_six_encodings_in_order_of_preference_whatever_the_package_adds() -> None:
    assert [(encoding.code, encoding.name) for encoding in VERSIONS[1].encodings] == [
        (1, "dense"), (2, "shared"), (3, "shrink"), (4, "bitmap"), (5, "csr"), (6, "slices"),
    ]  # fmt: skip


def test_v2_has_the_encodings_of_v1_and_gaps() -> None:
    assert VERSIONS[2].encodings == (*VERSIONS[1].encodings, ENCODINGS["gaps"])
    assert ENCODINGS["gaps"].code == 7


def test_versions_are_registered_under_their_number_with_unique_codes() -> None:
    for number, version in VERSIONS.items():
        assert version.number == number
        assert version.header_bytes >= HEADER_BYTES
        assert len(version.encodings_by_code) == len(version.encodings)
    assert len({encoding.code for encoding in ENCODINGS.values()}) == len(ENCODINGS)
