"""Messages of a sum: golden bytes, and refusal of everything that is not one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from secure_sums import SUM_ID, refuses

from flare_sparse.privacy.secure_aggregation.keys import SignedKeys, derive_key, draw_pad
from flare_sparse.privacy.secure_aggregation.messages import (
    pack_boxes,
    pack_members,
    pack_names,
    split_payload,
    unpack_boxes,
    unpack_members,
    unpack_names,
)
from flare_sparse.wire.steps import HEADER_BYTES, Step, pack_message, unpack_message

GOLDEN = Path(__file__).parent / "golden"
KEYS = SignedKeys("site-é", 412, bytes(range(32)), bytes(range(1, 33)), bytes(range(2, 34)), b"certificate", b"sig")
BOX = bytes(i % 251 for i in range(82))


def build_messages() -> dict[str, np.ndarray]:
    """Return a message of each step and direction; the numbers are arbitrary."""
    return {
        "keys-up": pack_message(Step.KEYS, SUM_ID, KEYS.to_bytes()),
        "shares-down": pack_message(Step.SHARES, SUM_ID, pack_members([KEYS, KEYS])),
        "values-down": pack_message(Step.VALUES, SUM_ID, pack_boxes({"b": BOX, "a": BOX[::-1]})),
        "values-up": pack_message(
            Step.VALUES, SUM_ID, bytes(16) + draw_pad(derive_key(bytes(32), "own pad", SUM_ID, "a"), 24).tobytes()
        ),
        "reveal-down": pack_message(Step.REVEAL, SUM_ID, pack_names(["a", "site-é"])),
    }


@pytest.mark.parametrize("name", sorted(build_messages()))
def test_message_has_its_golden_bytes(name: str) -> None:
    assert build_messages()[name].tobytes() == (GOLDEN / f"{name}.bin").read_bytes()


def test_golden_messages_mean_what_was_packed() -> None:
    payloads = {}
    for file in GOLDEN.glob("*.bin"):
        _, sum_id, payloads[file.stem] = unpack_message(np.frombuffer(file.read_bytes(), np.uint8), "site-1")
        assert sum_id == SUM_ID
    assert SignedKeys.from_bytes("site-é", payloads["keys-up"]) == KEYS
    assert unpack_members(payloads["shares-down"]) == [KEYS, KEYS]
    assert unpack_boxes(payloads["values-down"]) == {"a": BOX[::-1], "b": BOX}
    assert unpack_names(payloads["reveal-down"]) == ["a", "site-é"]


def test_message_without_a_payload_is_its_header_and_a_shorter_one_is_refused() -> None:
    message = pack_message(Step.KEYS, SUM_ID, b"")
    assert message.size == HEADER_BYTES
    assert unpack_message(message, "server")[2] == b""
    assert refuses(lambda: unpack_message(message[:-1], "server")) == "E_LEN"


@pytest.mark.parametrize("name", sorted(build_messages()))
def test_every_flipped_bit_of_the_header_is_noticed(name: str) -> None:
    message = build_messages()[name]
    for position in range(HEADER_BYTES):
        changed = message.copy()
        changed[position] ^= 4
        assert refuses(lambda changed=changed: unpack_message(changed, "site-1")) != ""


@given(data=st.binary(max_size=200))
def test_arbitrary_payloads_are_parsed_or_rejected(data: bytes) -> None:
    for unpack in (unpack_members, unpack_boxes, unpack_names, lambda raw: split_payload(raw, 33, "site-1")):
        assert refuses(lambda unpack=unpack: unpack(data)) in ("", "E_LEN", "E_CANON")


@pytest.mark.parametrize("message", [b"bytes", np.zeros(60, np.float32), np.zeros((8, 8), np.uint8), None])
def test_anything_but_an_array_of_bytes_is_rejected(message: object) -> None:
    assert refuses(lambda: unpack_message(message, "site-1")) == "E_DTYPE"  # type: ignore[arg-type]
