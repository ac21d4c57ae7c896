"""Bad input, section 1: what stands in a message. docs/reliability.md says what each row means here."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from flare_sparse.errors import RejectedMessage, RoundFailed, WireError
from flare_sparse.exchange import Patch
from flare_sparse.federation import RoundRules
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec, compute_digest
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES

every_encoding = pytest.mark.parametrize("encoding", ENCODINGS)


def encodings(*names: str) -> pytest.MarkDecorator:
    """Those that can express a row."""
    return pytest.mark.parametrize("encoding", names)


def bits(sent: Any) -> np.ndarray:
    """The plain bits of a bitmap or of a shrunk mask, with their padding."""
    raw = sent.parts.selection
    packed = raw[1:] if raw[0] == 0 else zstandard.decompress(raw[1:])
    return np.unpackbits(np.frombuffer(packed, np.uint8))


def repacked(sent: Any, change: Callable[[np.ndarray], None]) -> Any:
    """Another set of bits, uncompressed."""
    changed = bits(sent).copy()
    change(changed)
    return sent.said(b"\0" + np.packbits(changed).tobytes())


def indexed(sent: Any, encoding: str, change: Callable[[np.ndarray], None]) -> Any:
    """Other indices: of the columns of a CSR's first matrix, or of the rows of the first slices."""
    raw = bytearray(sent.parts.selection)
    start = 4 * 17 if encoding == "csr" else 5  # after 17 row pointers; after a mode and a count
    indices = np.frombuffer(raw, "<i4", 2, start).copy()
    change(indices)
    raw[start : start + 8] = indices.tobytes()
    return sent.said(bytes(raw))


def valued(sent: Any, numbers: Any, at: int = 0) -> Any:
    """Other numbers among the values, in the message's own format."""
    values = bytearray(sent.parts.values)
    raw = np.asarray(numbers).tobytes()
    values[at : at + len(raw)] = raw
    return replace(sent, message=replace(sent.parts, values=bytes(values)).sealed())


def patched(sent: Any, at: int, raw: bytes) -> Any:
    """Other bytes at a place of the message; its checksums stay as they were."""
    message = sent.message.copy()
    message[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
    return replace(sent, message=message)


def sparing(attack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The attack, looked at for what its refusal allocates: nothing that grows with what it claims."""

    def watched(sent: Any) -> Any:
        bad = attack(sent)
        tracemalloc.start()
        with pytest.raises(RejectedMessage):
            bad.arriving()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * sent.message.size + 2**16
        return bad

    return watched


@every_encoding
def test_row_01_claims_and_bombs_beyond_the_model(wire: Any, encoding: str) -> None:
    """Only bits are compressed, so only bitmap and shrink can carry a bomb; the others can claim."""
    bomb = b"\1" + zstandard.compress(bytes(50_000_000))
    bombs = [("E_SIZE", sparing(lambda sent: sent.said(bomb)))] if encoding in ("bitmap", "shrink") else []
    wire.refuses(
        ("E_SIZE", sparing(lambda sent: sent.sealed(scalars=sent.request.model.mask.size + 1))),
        ("E_SIZE", sparing(lambda sent: sent.sealed(scalars=2**60))),
        ("E_LEN", sparing(lambda sent: sent.sealed(selection_bytes=2**60))),
        *bombs,
    )


@every_encoding
def test_row_02_streams_that_are_too_short_or_too_long(wire: Any, encoding: str) -> None:
    """Dense and shared say nothing, so that nothing of theirs can be too short."""
    shorter = ("E_LEN", lambda sent: sent.said(sent.parts.selection[:-1]))
    frame = ("E_LEN", lambda sent: sent.said(b"\1" + zstandard.compress(np.packbits(bits(sent)).tobytes())[:-2]))
    wire.refuses(
        ("E_LEN", lambda sent: sent.said(sent.parts.selection + b"\0")),
        (
            "E_LEN",
            lambda sent: replace(sent, message=replace(sent.parts, values=sent.parts.values + bytes(8)).sealed()),
        ),
        ("E_LEN", lambda sent: replace(sent, message=np.concatenate([sent.message, np.zeros(8, np.uint8)]))),
        *([] if encoding in ("dense", "shared") else [shorter]),
        *([frame] if encoding in ("bitmap", "shrink") else []),
    )


@every_encoding
def test_row_03_another_number_of_values_than_of_selected_entries(wire: Any, encoding: str) -> None:
    def one_less(sent: Any) -> Any:
        parts = replace(sent.parts, values=sent.parts.values[:-4])
        return replace(sent, message=parts.sealed(scalars=sent.parts.header.scalars - 1))

    def one_bit_more(sent: Any) -> Any:
        return repacked(sent, lambda b: b.put(int(np.flatnonzero(b == 0)[0]), 1))

    counted = [("E_NNZ", one_bit_more)] if encoding in ("bitmap", "shrink") else []
    wire.refuses(("E_NNZ", one_less), *counted)


@encodings("csr", "slices")
def test_row_04_indices_that_are_unsorted_double_negative_or_too_large(wire: Any, encoding: str) -> None:
    """The other encodings have no indices: a place in a list of bits can be neither out of order nor out of range."""

    def with_(first: int, second: int) -> Any:
        return ("E_INDEX", lambda sent: indexed(sent, encoding, lambda i: i.put([0, 1], [first, second])))

    wire.refuses(with_(3, 0), with_(3, 3), with_(0, -1), with_(0, 12), with_(0, 2**31 - 1))


@every_encoding
def test_row_05_a_second_way_to_write_the_same(wire: Any, encoding: str) -> None:
    """There are no varints. Every message has fields that must be zero; bits have padding, slices have modes."""
    own: dict[str, list[Any]] = {
        "bitmap": [
            lambda sent: repacked(sent, lambda b: b.put(-1, 1)),
            lambda sent: sent.said(b"\7" + bytes(18)),
        ],
        "shrink": [
            lambda sent: repacked(sent, lambda b: b.put(-1, 1)),
            lambda sent: sent.said(b"\7" + bytes(18)),
        ],
        "slices": [lambda sent: sent.said(b"\7" + sent.parts.selection[1:])],
    }
    requires_base = encoding in ("shared", "shrink")
    named = [] if requires_base else [lambda sent: sent.sealed(base_mask=bytes(15) + b"\1")]
    wire.refuses(
        ("E_CANON", lambda sent: sent.sealed(base_sequence=3)),
        ("E_CANON", lambda sent: patched(sent, 11, b"\1")),
        *(("E_CANON", attack) for attack in [*named, *own.get(encoding, [])]),
    )


@every_encoding
def test_row_06_an_index_outside_the_broadcast_mask(catalogue: Any, encoding: str) -> None:
    """Asked for a part of what may change, the site sends another: each encoding as far outside as it can say.

    What is pruned does not come back because a site sends it.
    """
    wire = catalogue.Wire("shrink")
    asked, trainable = wire.on, wire.trainable
    beyond = Mask(torch.arange(asked.size) == int((~trainable).indices[0]))
    rows = Mask(wire.layout.select(lambda entry: entry.name == "0.bias"))
    other = {
        "dense": Mask.full(asked.size),
        "shared": trainable,
        "shrink": asked | Mask(torch.arange(asked.size) == int((trainable - asked).indices[0])),
        "bitmap": asked | beyond,
        "csr": (asked | beyond) - Mask(torch.arange(asked.size) == int(asked.indices[0])),
        "slices": rows,
    }[encoding]
    wire.refuses(("E_MASK", lambda sent: sent.on(encoding, other)))


@every_encoding
def test_row_07_other_numbers_than_the_jobs(wire: Any, encoding: str) -> None:
    """No format is cast: neither an unknown one, nor one that is known but not this job's, nor another array."""

    def doubles(sent: Any) -> Any:
        values = np.frombuffer(sent.parts.values, "<f4").astype("<f8").tobytes()
        return replace(sent, message=replace(sent.parts, values=values).sealed())

    arrays = [np.float64, np.bool_, np.complex64, object]
    wire.refuses(
        ("E_DTYPE", lambda sent: sent.sealed(values=9)),
        ("E_DTYPE", lambda sent: sent.on(encoding, sent.update.patch.mask, "float16")),
        ("E_DTYPE", lambda sent: sent.on(encoding, sent.update.patch.mask, "bfloat16")),
        ("E_LEN", doubles),
        *(("E_DTYPE", lambda sent, kind=kind: replace(sent, message=sent.message.astype(kind))) for kind in arrays),
    )


@every_encoding
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
def test_row_08_nan_and_infinity_in_every_format(catalogue: Any, encoding: str, values: Any) -> None:
    """The short formats' infinities are found after widening; the smallest numbers that a format has are numbers."""
    infinite = {
        "float32": "<u4 7f800000 ff800000 7fc00000",
        "float16": "<u2 7c00 fc00 7e00",
        "bfloat16": "<u2 7f80 ff80 7fc0",
    }
    kind, *patterns = infinite[values].split()
    wire = catalogue.Wire(encoding, values)
    wire.refuses(
        *(("E_FINITE", lambda sent, p=p: valued(sent, np.array([int(p, 16)], kind))) for p in patterns),
    )
    tiny = wire.play(lambda t, sent: valued(sent, np.array([1], kind)))[0]
    assert all(record.rejected == {} for record in tiny.rounds)


@every_encoding
def test_row_09_big_endian_messages(wire: Any, encoding: str) -> None:
    """There is one byte order and no flag: a header of the other is another version, swapped values are damage."""

    def swapped(sent: Any) -> Any:
        start = sent.parts.header.values_start
        other = sent.message[start:].view("<u4").byteswap().tobytes()
        return patched(sent, start, other)

    wire.refuses(
        ("E_VERSION", lambda sent: patched(sent, 4, b"\0\1")),
        ("E_VERSION", lambda sent: patched(sent, 0, b"MPSF")),
        ("E_CRC", swapped),
    )


@every_encoding
def test_row_10_the_memory_that_values_come_from_does_not_show(wire: Any, encoding: str) -> None:
    """Strided, column-major and stride-0 sources are written as they read, and read from a strided buffer as well."""
    forms = {
        1: lambda v: torch.stack([v, -v], 1)[:, 0],
        2: lambda v: torch.from_numpy(np.asfortranarray(np.stack([v.numpy(), v.numpy()]))[0]),
        3: lambda v: v[:1].expand(v.numel()),
    }

    def rewritten(t: int, sent: Any) -> Any:
        source = forms[t](sent.update.patch.values)
        assert not source.is_contiguous()
        plain = replace(sent.update, patch=Patch(source.contiguous(), sent.update.patch.mask))
        strided = replace(sent.update, patch=Patch(source, sent.update.patch.mask))
        message, expected = (sent.site.encode(sent.request, update).data for update in (strided, plain))
        assert message.tobytes() == expected.tobytes()
        return sent

    outcome, _ = wire.play(lambda t, s: replace(rewritten(t, s), message=np.repeat(s.message, 2)[::2]), rounds=3)
    assert all(record.rejected == {} for record in outcome.rounds)
    assert compute_digest(outcome.weights) == wire.undisturbed(3)


def refused_each(sent: Any, messages: Any) -> set[str]:
    """The codes that the server's desk refuses some messages with."""
    codes = set()
    for message in messages:
        with pytest.raises(WireError) as caught:
            replace(sent, message=message).arriving()
        codes.add(caught.value.code)
    return codes


@every_encoding
def test_row_11_a_message_cut_at_every_byte(wire: Any, encoding: str) -> None:
    """A cut by whole words leaves a length that could be one; the checksums know better."""

    def cut(sent: Any) -> Any:
        codes = refused_each(sent, (sent.message[:end] for end in range(sent.message.size)))
        assert codes <= {"E_LEN", "E_CRC"}
        return replace(sent, message=sent.message[:-3])

    wire.refuses(("E_LEN", cut), ("E_CRC", lambda sent: replace(sent, message=sent.message[:-8])))


@every_encoding
def test_row_12_every_flipped_bit(wire: Any, encoding: str) -> None:
    """Damage is E_CRC unless it strikes one of the few fields that are looked at before the checksums."""

    def flipped(sent: Any) -> Any:
        def each() -> Any:
            for bit in range(8 * sent.message.size):
                damaged = sent.message.copy()
                damaged[bit // 8] ^= 1 << bit % 8
                yield damaged

        codes = refused_each(sent, each())
        assert codes <= {"E_CRC", "E_VERSION", "E_LEN", "E_CANON", "E_KIND"}
        return patched(sent, sent.message.size - 1, bytes([sent.message[-1] ^ 64]))

    wire.refuses(("E_CRC", flipped), ("E_CRC", lambda sent: patched(sent, HEADER_BYTES - 1, b"\x55")))


@every_encoding
def test_row_13_a_tensor_that_is_missing(wire: Any, encoding: str) -> None:
    """Dense and shared name no entries, so that leaving some out can only be another number of values."""

    def without_last(sent: Any) -> Any:
        if encoding not in ("dense", "shared"):
            bias = Mask(wire.layout.select(lambda entry: entry.name in ("0.bias", "2.weight")))
            return sent.on(encoding, sent.update.patch.mask - bias)
        parts = replace(sent.parts, values=sent.parts.values[:-4])
        return replace(sent, message=parts.sealed(scalars=sent.parts.header.scalars - 1))

    wire.refuses(("E_NNZ" if encoding in ("dense", "shared") else "E_MASK", without_last))


def of_another(wire: Any, change: Callable[[list[TensorSpec]], list[TensorSpec]]) -> tuple[str, Callable[[Any], Any]]:
    """A message of a site whose network has other tensors; their names never travel, their fingerprint does."""
    fingerprint = Layout(tuple(change(list(wire.layout.tensors)))).fingerprint
    return "E_LAYOUT", lambda sent: sent.sealed(layout=bytes.fromhex(fingerprint))


@every_encoding
def test_row_14_extra_double_and_look_alike_tensors(wire: Any, encoding: str) -> None:
    wire.refuses(
        of_another(wire, lambda entries: [*entries, TensorSpec("extra", (2, 2), "weight")]),
        of_another(wire, lambda entries: [*entries, entries[0]]),
        of_another(wire, lambda entries: [replace(entries[0], name="0.w\u0435ight"), *entries[1:]]),
        of_another(wire, lambda entries: [replace(entries[0], name="0" * 2**20), *entries[1:]]),
    )


@every_encoding
def test_row_15_shapes_that_would_broadcast(wire: Any, encoding: str) -> None:
    shapes = [(1,), (10, 1), (12, 10), (120,)]
    wire.refuses(*(of_another(wire, lambda e, shape=shape: [replace(e[0], shape=shape), *e[1:]]) for shape in shapes))


@every_encoding
def test_row_16_an_empty_selection_abstains(catalogue: Any, encoding: str) -> None:
    """Where a site may choose, no entry is an answer without weight; dense and shared cannot say it but by kind."""
    wire = catalogue.Wire(encoding, free=True)

    def empty(t: int, sent: Any) -> Any:
        if t == 1 or encoding in ("dense", "shared"):
            return sent.sealed(content=3)
        return sent.on(encoding, Mask.empty(sent.update.patch.mask.size))

    outcome, _ = wire.play(empty)
    *training, last = outcome.rounds
    assert all(record.abstained == ["site-2"] and record.rejected == {} and record.is_balanced for record in training)
    assert all(record.sites_contributed == ["site-1", "site-3"] for record in training)
    assert len(last.sites_contributed) == 3
    assert compute_digest(outcome.weights) == wire.without()


@every_encoding
def test_row_17_a_round_in_which_all_are_empty(wire: Any, encoding: str) -> None:
    """The model stays, the round is asked again, and the run stops when nobody ever has anything to say."""
    seen: dict[tuple[int, str], int] = {}

    def first_time(t: int, sent: Any) -> Any:
        seen[key] = seen.get(key := (t, sent.site.site.name), 0) + 1
        return sent.sealed(content=3) if t == 2 and seen[key] == 1 else sent

    everybody = ("site-1", "site-2", "site-3")
    outcome, _ = wire.play(first_time, hostile=everybody)
    assert [record.attempts for record in outcome.rounds] == [1, 2, 1]
    assert compute_digest(outcome.weights) == wire.undisturbed()
    with pytest.raises(RoundFailed, match="0 of 3 sites contributed") as caught:
        wire.play(lambda t, sent: sent.sealed(content=3), hostile=everybody, rules=RoundRules(retries=1))
    assert caught.value.code == "E_QUORUM"


@pytest.mark.parametrize("method", ["lora_a2", "flexlora", "hetlora", "ffa_lora"])
def test_row_18_other_ranks_than_a_sites_own(catalogue: Any, method: str) -> None:
    """A rank is a selection, so its code is E_MASK: rank 0, too much, too little, A and B of two ranks, part of a slot."""
    ranks = {} if method == "ffa_lora" else {"rank": 3, "ranks": {"site-2": 2}}
    wire = catalogue.Ready(method, task="Adapted", **ranks)
    slots = wire.method(1).slots
    uneven = (slots.select_first(2) & slots.factors["A"]) | (slots.select_first(1) & slots.factors["B"])
    wrong = [slots.rest, slots.select_first(slots.rank) | slots.rest, uneven | slots.rest]
    if method != "hetlora":  # whose sites may give up their last rank
        wrong.append(slots.select_first(1) | slots.rest)
    if method != "ffa_lora":  # whose sites send all of B
        wrong.append(slots.factors["B"] | slots.rest)
    wrong.append(slots.factors["A"] | slots.rest)

    def part_of_a_slot(sent: Any) -> Any:
        on = sent.update.patch.mask
        return sent.on("bitmap", on - Mask(torch.arange(on.size) == int(on.indices[0])))

    wire.refuses(
        *(("E_MASK", lambda sent, on=on: sent.on("bitmap", on)) for on in wrong),
        ("E_MASK", part_of_a_slot),
    )


@every_encoding
def test_row_19_a_quantisers_scale(wire: Any, encoding: str) -> None:
    """No format has one; a message of one that would is of a format that is none of ours."""
    wire.refuses(*(("E_DTYPE", lambda sent, code=code: sent.sealed(values=code)) for code in (0, 4, 5, 255)))


@every_encoding
def test_row_20_unknown_versions_and_flags(wire: Any, encoding: str) -> None:
    wire.refuses(
        ("E_VERSION", lambda sent: patched(sent, 0, b"FSPX")),
        ("E_VERSION", lambda sent: patched(sent, 4, b"\2\0")),
        ("E_VERSION", lambda sent: sent.sealed(encoding=99)),
        ("E_VERSION", lambda sent: sent.sealed(trainable=99)),
        ("E_VERSION", lambda sent: sent.sealed(content=9)),
        ("E_VERSION", lambda sent: sent.sealed(base=9)),
    )
