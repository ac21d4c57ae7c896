"""Collections: golden bytes, round trip, and refusal of everything that is not one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.wire.collection import Parcel, pack_collection, unpack_collection

MESSAGE = np.arange(5, dtype=np.uint8)


def refuse(data: object) -> str:
    """Return the code with which a collection is refused."""
    with pytest.raises(RejectedMessage) as caught:
        unpack_collection(data, "hub-1")
    return caught.value.code


def test_collection_begins_with_magic_version_length_and_checksum() -> None:
    data = pack_collection({"topic": "sum"}, [Parcel(("site-1",), {"code": "E_LEN"}), Parcel(("a", "é"), {}, MESSAGE)])
    assert data[:8].tobytes() == b"FSPB\x01\x00\x00\x00"
    assert int.from_bytes(data[8:16].tobytes(), "little") == data.size - 20
    assert b'{"topic":"sum"}' in data.tobytes()


note = st.dictionaries(
    st.text(max_size=4), st.integers() | st.floats(allow_nan=False) | st.text(max_size=4), max_size=3
)
parcels = st.lists(
    st.tuples(
        st.lists(st.text(max_size=6), min_size=1, max_size=3, unique=True), note, st.none() | st.binary(max_size=9)
    ),
    max_size=4,
)


@given(subject=note, content=parcels)
def test_collection_means_what_was_packed(
    subject: dict[str, object], content: list[tuple[list[str], dict, bytes]]
) -> None:
    packed = [
        Parcel(
            tuple(sites),
            {k: v for k, v in note.items() if k != "message"},
            None if m is None else np.frombuffer(m, np.uint8),
        )
        for sites, note, m in content
    ]
    actual_subject, actual = unpack_collection(pack_collection(subject, packed), "hub-1")
    assert actual_subject == subject
    assert [(p.sites, p.note) for p in actual] == [(p.sites, p.note) for p in packed]
    for read, written in zip(actual, packed, strict=True):
        assert (read.message is None) == (written.message is None)
        assert read.message is None or read.message.tobytes() == written.message.tobytes()


@given(data=st.binary(max_size=80))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    assert refuse(np.frombuffer(data, np.uint8)) in ("E_LEN", "E_VERSION", "E_CRC")


def test_every_changed_byte_is_noticed() -> None:
    data = pack_collection({"topic": "sum"}, [Parcel(("site-1",), {}, MESSAGE)])
    for position in range(data.size):
        changed = data.copy()
        changed[position] ^= 4
        assert refuse(changed) in ("E_LEN", "E_VERSION", "E_CRC")


def test_malformed_content_with_a_valid_checksum_is_refused() -> None:
    assert refuse("text") == "E_DTYPE"
    assert refuse(pack_collection({}, [Parcel(())])) == "E_CANON"
    assert refuse(pack_collection({}, [Parcel(("a", "a"))])) == "E_CANON"
    assert refuse(pack_collection({"x": "y" * 2**16}, [])) == "E_SIZE"
