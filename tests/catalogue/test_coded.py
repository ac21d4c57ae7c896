"""Bad input, section 1: quantized and compressed values, gap-coded selections, differences. See docs/bad-input.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard

from flare_sparse.wire.envelope import read_header, write_header

QUANTIZED = pytest.mark.parametrize("values", ["int8", "int4", "int2", "int1"])
COUNT = 8
"""Bytes before the scales: the number of exact values, of which the toy network has none."""


def with_section(sent: Any, change: Callable[[bytearray], None]) -> Any:
    """Return the upload after changing its values section in place, with valid checksums."""
    header, message = read_header(sent.message), sent.message.copy()
    section = bytearray(message[header.values_start :].tobytes())
    change(section)
    section += bytes(-len(section) % 8)
    message = np.concatenate([message[: header.values_start], np.frombuffer(section, np.uint8)])
    write_header(header, message)
    return replace(sent, message=message)


def put(offset: int, raw: bytes) -> Callable[[Any], Any]:
    """Return the attack that overwrites bytes of the values section."""

    def change(section: bytearray) -> None:
        section[offset : offset + len(raw)] = raw

    return lambda sent: with_section(sent, change)


@pytest.mark.slow
@QUANTIZED
@pytest.mark.row(19)
def test_scales_that_are_negative_or_not_finite_are_rejected(catalogue: Any, values: Any) -> None:
    """A scale of 1e38 is a finite number like any other; an update with it is far longer than the others."""
    wire = catalogue.Wire("shared", values)
    wire.assert_rejects(
        ("E_FINITE", put(COUNT, b"\x80\x7f")),
        ("E_FINITE", put(COUNT, b"\xc0\x7f")),
        ("E_RANGE", put(COUNT, b"\x80\xbf")),
        ("E_RANGE", put(COUNT, b"\x00\x80")),
    )
    huge, _ = wire.run(lambda t, sent: put(COUNT, b"\x96\x7e")(sent))
    assert [record.rejected for record in huge.rounds] == [{"site-2": "E_NORM"}] * 2 + [{}]


@pytest.mark.slow
@QUANTIZED
@pytest.mark.row(44)
def test_codes_that_mean_nothing_and_wrong_counts_are_rejected(catalogue: Any, values: Any) -> None:
    wire = catalogue.Wire("shared", values)
    wire.assert_rejects(
        ("E_CANON", put(COUNT, b"\0\0")),
        ("E_NNZ", claim_exact),
        ("E_SIZE", put(0, b"\xff" * 8)),
    )


def claim_exact(sent: Any) -> Any:
    """Return an upload of zeros, one of them as a float32 that the receiver's layout does not have."""
    header = read_header(sent.message)
    bits, rounded = {5: 8, 6: 4, 7: 2, 10: 1}[header.values], header.scalars - 1
    size = 8 + 4 + 2 * -(-rounded // 64) + -(-rounded * bits // 8)

    def change(section: bytearray) -> None:
        section[:] = (1).to_bytes(8, "little") + bytes(size - 8)

    return with_section(sent, change)


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32_zstd", "bfloat16_zstd"])
@pytest.mark.row(45)
def test_compressed_values_of_another_size_are_rejected(catalogue: Any, values: Any) -> None:
    width = {"float32_zstd": 4, "bfloat16_zstd": 2}[values]

    def send_columns(*columns: bytes) -> Callable[[Any], Any]:
        """Return the attack that sends these columns, and plain zeros for those that are missing."""

        def attack(sent: Any) -> Any:
            scalars = read_header(sent.message).scalars
            all_columns = [*columns, *[bytes(scalars)] * (width - len(columns))]
            lengths = np.array([len(column) for column in all_columns], "<u8").tobytes()

            def change(section: bytearray) -> None:
                section[:] = lengths + b"".join(all_columns)

            return with_section(sent, change)

        return attack

    catalogue.Wire("shared", values).assert_rejects(
        ("E_SIZE", send_columns(zstandard.compress(bytes(2**24))[:80])),
        ("E_SIZE", send_columns(bytes(200))),
        ("E_LEN", send_columns(b"not a frame")),
        ("E_LEN", lambda sent: with_section(sent, lambda section: section.extend(bytes(8)))),
    )


@pytest.mark.slow
@pytest.mark.parametrize("values", ["float32_zstd", "int4"])
@pytest.mark.row(46)
def test_gaps_that_are_no_selection_are_rejected(catalogue: Any, values: Any) -> None:
    wire = catalogue.Wire("gaps", values)
    wire.assert_rejects(
        ("E_SIZE", lambda sent: sent.with_selection((2**60).to_bytes(8, "little") + sent.parts.selection[8:])),
        ("E_LEN", lambda sent: sent.with_selection(sent.parts.selection[:-1])),
        ("E_LEN", lambda sent: sent.with_selection(sent.parts.selection + b"\0")),
        ("E_INDEX", lambda sent: sent.with_selection((1).to_bytes(8, "little") + b"\x07\xff" + bytes(3) + b"\x01")),
        ("E_NNZ", lambda sent: sent.with_selection((1).to_bytes(8, "little") + b"\x00\x80")),
        ("E_CANON", lambda sent: sent.with_selection((1).to_bytes(8, "little") + b"\x01\x00\x80")),
    )


@pytest.mark.slow
@QUANTIZED
@pytest.mark.row(47)
def test_difference_to_another_vector_asks_for_the_full_model_once(catalogue: Any, values: Any) -> None:
    """The first update that refers to a vector that the server did not send costs one more message, the second one."""
    wire = catalogue.MethodWire("fedavg", values)
    outcome, _ = wire.run(lambda t, sent: with_header(sent, base="9" * 16) if t == 1 else sent)
    assert outcome.rounds[0].rejected == {"site-2": "E_NOT_HELD"}
    outcome, _ = wire.run(lambda t, sent: with_header(sent, patch_base=0) if t == 1 else sent)
    assert outcome.rounds[0].rejected == {"site-2": "E_CANON"}


def with_header(sent: Any, **fields: Any) -> Any:
    """Return the upload with other fields in the header of its message, values untouched."""
    message = sent.message.copy()
    write_header(replace(read_header(message), **fields), message)
    return replace(sent, message=message)
