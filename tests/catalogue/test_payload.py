"""Bad input, section 1: content of a message. docs/bad-input.md says what each row means here."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from local_federation import LocalFederation, Upload
from toy import Toy, ToyBench

from flare_sparse.core.errors import RejectedMessage, RoundFailed, WireError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec, compute_digest
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.envelope import HEADER_BYTES, VERSION
from flare_sparse.wire.formats import FORMATS

# The encodings of version 1, which float32 jobs use; test_coded.py has what version 2 adds.
every_encoding = pytest.mark.parametrize("encoding", list(ENCODINGS))


def unpack_bits(sent: Any) -> np.ndarray:
    """Return the bits of a bitmap or shrink selection, with their padding."""
    raw = sent.parts.selection
    packed = raw[1:] if raw[0] == 0 else zstandard.decompress(raw[1:])
    return np.unpackbits(np.frombuffer(packed, np.uint8))


def with_changed_bits(sent: Any, change: Callable[[np.ndarray], None]) -> Any:
    """Return the upload with a changed set of bits, uncompressed."""
    changed = unpack_bits(sent).copy()
    change(changed)
    return sent.with_selection(b"\0" + np.packbits(changed).tobytes())


def with_changed_indices(sent: Any, change: Callable[[np.ndarray], None]) -> Any:
    """Change the row indices of the first slices."""
    raw = bytearray(sent.parts.selection)
    start = 5  # after a mode and a count
    indices = np.frombuffer(raw, "<i4", 2, start).copy()
    change(indices)
    raw[start : start + 8] = indices.tobytes()
    return sent.with_selection(bytes(raw))


def with_values_at(sent: Any, numbers: Any, at: int = 0) -> Any:
    """Overwrite values from byte ``at``, in the message's own number format."""
    values = bytearray(sent.parts.values)
    raw = np.asarray(numbers).tobytes()
    values[at : at + len(raw)] = raw
    return replace(sent, message=replace(sent.parts, values=bytes(values)).to_message())


def with_bytes_at(sent: Any, at: int, raw: bytes) -> Any:
    """Overwrite bytes of the message at an offset; its checksums stay as they were."""
    message = sent.message.copy()
    message[at : at + len(raw)] = np.frombuffer(raw, np.uint8)
    return replace(sent, message=message)


def assert_small_allocation(attack: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the attack, with a check that its rejection allocates nothing that grows with what it claims."""

    def check_allocation(sent: Any) -> Any:
        bad = attack(sent)
        tracemalloc.start()
        with pytest.raises(RejectedMessage):
            bad.decode()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * sent.message.size + 2**16
        return bad

    return check_allocation


@pytest.mark.slow
@every_encoding
@pytest.mark.row(1)
def test_sizes_beyond_the_model_are_rejected_without_allocation(wire: Any, encoding: str) -> None:
    """Only bits are compressed, so only bitmap and shrink can carry a bomb; the others can claim a size."""
    bomb = b"\1" + zstandard.compress(bytes(50_000_000))
    bombs = (
        [("E_SIZE", assert_small_allocation(lambda sent: sent.with_selection(bomb)))]
        if encoding in ("bitmap", "shrink")
        else []
    )
    wire.assert_rejects(
        ("E_SIZE", assert_small_allocation(lambda sent: sent.with_header(scalars=sent.request.model.mask.size + 1))),
        ("E_SIZE", assert_small_allocation(lambda sent: sent.with_header(scalars=2**60))),
        ("E_LEN", assert_small_allocation(lambda sent: sent.with_header(selection_bytes=2**60))),
        *bombs,
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.row(2)
def test_streams_of_a_wrong_length_are_rejected(wire: Any, encoding: str) -> None:
    """The selection of dense and shared is empty and cannot be too short."""
    shorter = ("E_LEN", lambda sent: sent.with_selection(sent.parts.selection[:-1]))
    frame = (
        "E_LEN",
        lambda sent: sent.with_selection(b"\1" + zstandard.compress(np.packbits(unpack_bits(sent)).tobytes())[:-2]),
    )
    wire.assert_rejects(
        ("E_LEN", lambda sent: sent.with_selection(sent.parts.selection + b"\0")),
        (
            "E_LEN",
            lambda sent: replace(sent, message=replace(sent.parts, values=sent.parts.values + bytes(8)).to_message()),
        ),
        ("E_LEN", lambda sent: replace(sent, message=np.concatenate([sent.message, np.zeros(8, np.uint8)]))),
        *([] if encoding in ("dense", "shared") else [shorter]),
        *([frame] if encoding in ("bitmap", "shrink") else []),
    )


@every_encoding
@pytest.mark.row(3)
def test_values_must_be_as_many_as_selected_entries(wire: Any, encoding: str) -> None:
    def send_one_value_less(sent: Any) -> Any:
        parts = replace(sent.parts, values=sent.parts.values[:-4])
        return replace(sent, message=parts.to_message(scalars=sent.parts.header.scalars - 1))

    def select_one_entry_more(sent: Any) -> Any:
        return with_changed_bits(sent, lambda b: b.put(int(np.flatnonzero(b == 0)[0]), 1))

    counted = [("E_NNZ", select_one_entry_more)] if encoding in ("bitmap", "shrink") else []
    wire.assert_rejects(("E_NNZ", send_one_value_less), *counted)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["slices"])
@pytest.mark.row(4)
def test_unsorted_double_negative_or_large_indices_are_rejected(wire: Any) -> None:
    """The other encodings have no indices."""

    def send_indices(first: int, second: int) -> Any:
        return ("E_INDEX", lambda sent: with_changed_indices(sent, lambda i: i.put([0, 1], [first, second])))

    wire.assert_rejects(*(send_indices(*pair) for pair in [(3, 0), (3, 3), (0, -1), (0, 12), (0, 2**31 - 1)]))


@pytest.mark.slow
@every_encoding
@pytest.mark.row(5)
def test_message_has_one_canonical_form(wire: Any, encoding: str) -> None:
    """Every header has fields that must be zero; bits have padding, slices have modes. The format has no varints."""
    own: dict[str, list[Any]] = {
        "bitmap": [
            lambda sent: with_changed_bits(sent, lambda b: b.put(-1, 1)),
            lambda sent: sent.with_selection(b"\7" + bytes(18)),
        ],
        "shrink": [
            lambda sent: with_changed_bits(sent, lambda b: b.put(-1, 1)),
            lambda sent: sent.with_selection(b"\7" + bytes(18)),
        ],
        "slices": [lambda sent: sent.with_selection(b"\7" + sent.parts.selection[1:])],
    }
    requires_base = encoding in ("shared", "shrink")
    named = [] if requires_base else [lambda sent: sent.with_header(base="1" * 16)]
    wire.assert_rejects(
        ("E_CANON", lambda sent: with_bytes_at(sent, 11, b"\1")),
        *(("E_CANON", attack) for attack in [*named, *own.get(encoding, [])]),
    )


@every_encoding
@pytest.mark.row(6)
def test_entries_outside_the_requested_mask_are_rejected(catalogue: Any, encoding: str) -> None:
    """The site sends other entries than those requested, in each encoding.

    A pruned entry does not become live because a site sends it.
    """
    wire = catalogue.Wire("shrink")
    asked, trainable = wire.selection, wire.trainable
    beyond = Mask(torch.arange(asked.size) == int((~trainable).indices[0]))
    rows = Mask(wire.layout.select(lambda entry: entry.name == "0.bias"))
    other = {
        "dense": Mask.full(asked.size),
        "shared": trainable,
        "shrink": asked | Mask(torch.arange(asked.size) == int((trainable - asked).indices[0])),
        "bitmap": asked | beyond,
        "slices": rows,
        "gaps": beyond,
    }[encoding]
    wire.assert_rejects(("E_MASK", lambda sent: sent.with_mask(encoding, other)))


@pytest.mark.slow
@every_encoding
@pytest.mark.row(7)
def test_another_number_format_is_rejected(wire: Any, encoding: str) -> None:
    """No format is cast: unknown formats, known formats of other jobs and other array types are rejected."""

    def send_doubles(sent: Any) -> Any:
        values = np.frombuffer(sent.parts.values, "<f4").astype("<f8").tobytes()
        return replace(sent, message=replace(sent.parts, values=values).to_message())

    arrays = [np.float64, np.bool_, np.complex64, object]
    wire.assert_rejects(
        *(("E_DTYPE", lambda sent, code=code: sent.with_header(values=code)) for code in (0, 4, 255)),
        # Formats of other jobs whose sections have lengths of their own, which come first.
        *(("E_SIZE", lambda sent, code=code: sent.with_header(values=code)) for code in (5, 9)),
        ("E_DTYPE", lambda sent: sent.with_mask(encoding, sent.update.patch.mask, "float16")),
        ("E_DTYPE", lambda sent: sent.with_mask(encoding, sent.update.patch.mask, "bfloat16")),
        ("E_LEN", send_doubles),
        *(("E_DTYPE", lambda sent, kind=kind: replace(sent, message=sent.message.astype(kind))) for kind in arrays),
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.parametrize("values", ["float32", "float16", "bfloat16"])
@pytest.mark.row(8)
def test_nan_and_infinity_are_rejected_in_every_format(catalogue: Any, encoding: str, values: Any) -> None:
    """Subnormal numbers are accepted. Infinities of the short formats are found after widening."""
    infinite = {
        "float32": "<u4 7f800000 ff800000 7fc00000",
        "float16": "<u2 7c00 fc00 7e00",
        "bfloat16": "<u2 7f80 ff80 7fc0",
    }
    kind, *patterns = infinite[values].split()
    wire = catalogue.Wire(encoding, values)
    wire.assert_rejects(
        *(("E_FINITE", lambda sent, p=p: with_values_at(sent, np.array([int(p, 16)], kind))) for p in patterns),
    )
    tiny = wire.run(lambda t, sent: with_values_at(sent, np.array([1], kind)))[0]
    assert all(record.rejected == {} for record in tiny.rounds)


@pytest.mark.slow
@every_encoding
@pytest.mark.row(9)
def test_big_endian_messages_are_rejected(wire: Any, encoding: str) -> None:
    """The format has one byte order: a swapped header reads as another version, swapped values fail the checksum."""

    def swap_values(sent: Any) -> Any:
        start = sent.parts.header.values_start
        other = sent.message[start:].view("<u4").byteswap().tobytes()
        return with_bytes_at(sent, start, other)

    wire.assert_rejects(
        ("E_VERSION", lambda sent: with_bytes_at(sent, 4, b"\0\1")),
        ("E_VERSION", lambda sent: with_bytes_at(sent, 0, b"MPSF")),
        ("E_CRC", swap_values),
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.row(10)
def test_memory_layout_of_values_does_not_change_the_message(wire: Any, encoding: str) -> None:
    """Strided, column-major and stride-0 tensors are encoded by value; a strided buffer can be decoded."""
    forms = {
        1: lambda v: torch.stack([v, -v], 1)[:, 0],
        2: lambda v: torch.from_numpy(np.asfortranarray(np.stack([v.numpy(), v.numpy()]))[0]),
        3: lambda v: v[:1].expand(v.numel()),
    }

    def encode_strided(t: int, sent: Any) -> Any:
        source = forms[t](sent.update.patch.values)
        assert not source.is_contiguous()
        plain = replace(sent.update, patch=Patch(source.contiguous(), sent.update.patch.mask))
        strided = replace(sent.update, patch=Patch(source, sent.update.patch.mask))
        message, expected = (sent.endpoint.encode(sent.request, update).data for update in (strided, plain))
        assert message.tobytes() == expected.tobytes()
        return sent

    outcome, _ = wire.run(lambda t, s: replace(encode_strided(t, s), message=np.repeat(s.message, 2)[::2]), rounds=3)
    assert all(record.rejected == {} for record in outcome.rounds)
    assert compute_digest(outcome.weights) == wire.compute_honest_digest(3)


def list_rejection_codes(sent: Any, messages: Any) -> set[str]:
    """Return the codes with which the server rejects some messages."""
    codes = set()
    for message in messages:
        with pytest.raises(WireError) as caught:
            replace(sent, message=message).decode()
        codes.add(caught.value.code)
    return codes


@every_encoding
@pytest.mark.row(11)
def test_message_cut_at_any_byte_is_rejected(wire: Any, encoding: str) -> None:
    """A cut by whole words leaves a valid length, but wrong checksums."""

    def cut_message(sent: Any) -> Any:
        codes = list_rejection_codes(sent, (sent.message[:end] for end in range(sent.message.size)))
        assert codes <= {"E_LEN", "E_CRC"}
        return replace(sent, message=sent.message[:-3])

    wire.assert_rejects(("E_LEN", cut_message), ("E_CRC", lambda sent: replace(sent, message=sent.message[:-8])))


@pytest.mark.slow
@every_encoding
@pytest.mark.row(12)
def test_any_flipped_bit_is_rejected(wire: Any, encoding: str) -> None:
    """The code is E_CRC unless the bit is in one of the fields that are read before the checksums."""

    def flip_bits(sent: Any) -> Any:
        def each() -> Any:
            for bit in range(8 * sent.message.size):
                damaged = sent.message.copy()
                damaged[bit // 8] ^= 1 << bit % 8
                yield damaged

        codes = list_rejection_codes(sent, each())
        assert codes <= {"E_CRC", "E_VERSION", "E_LEN", "E_CANON", "E_KIND"}
        return with_bytes_at(sent, sent.message.size - 1, bytes([sent.message[-1] ^ 64]))

    wire.assert_rejects(("E_CRC", flip_bits), ("E_CRC", lambda sent: with_bytes_at(sent, HEADER_BYTES - 1, b"\x55")))


@every_encoding
@pytest.mark.row(13)
def test_update_without_one_tensor_is_rejected(wire: Any, encoding: str) -> None:
    """Dense and shared name no entries: an update without a tensor has a wrong number of values."""

    def leave_out_tensor(sent: Any) -> Any:
        if encoding not in ("dense", "shared"):
            bias = Mask(wire.layout.select(lambda entry: entry.name in ("0.bias", "2.weight")))
            return sent.with_mask(encoding, sent.update.patch.mask - bias)
        parts = replace(sent.parts, values=sent.parts.values[:-4])
        return replace(sent, message=parts.to_message(scalars=sent.parts.header.scalars - 1))

    wire.assert_rejects(("E_NNZ" if encoding in ("dense", "shared") else "E_MASK", leave_out_tensor))


def claim_layout(wire: Any, change: Callable[[list[TensorSpec]], list[TensorSpec]]) -> tuple[str, Callable[[Any], Any]]:
    """Return an attack from a network with other tensors; the layout's fingerprint travels, not its names."""
    fingerprint = Layout(tuple(change(list(wire.layout.tensors)))).fingerprint
    return "E_LAYOUT", lambda sent: sent.with_header(layout=bytes.fromhex(fingerprint))


@pytest.mark.slow
@every_encoding
@pytest.mark.row(14)
def test_extra_double_and_look_alike_tensors_are_rejected(wire: Any, encoding: str) -> None:
    wire.assert_rejects(
        claim_layout(wire, lambda entries: [*entries, TensorSpec("extra", (2, 2), "weight")]),
        claim_layout(wire, lambda entries: [*entries, entries[0]]),
        claim_layout(wire, lambda entries: [replace(entries[0], name="0.w\u0435ight"), *entries[1:]]),
        claim_layout(wire, lambda entries: [replace(entries[0], name="0" * 2**20), *entries[1:]]),
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.row(15)
def test_shapes_that_would_broadcast_are_rejected(wire: Any, encoding: str) -> None:
    shapes = [(1,), (10, 1), (12, 10), (120,)]
    wire.assert_rejects(
        *(claim_layout(wire, lambda e, shape=shape: [replace(e[0], shape=shape), *e[1:]]) for shape in shapes)
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.row(16)
def test_site_with_an_empty_selection_abstains(catalogue: Any, encoding: str) -> None:
    """Where a site chooses its entries it may send none. Dense and shared need the content "metrics" for it."""
    wire = catalogue.Wire(encoding, is_free=True)

    def send_nothing(t: int, sent: Any) -> Any:
        if t == 1 or encoding in ("dense", "shared"):
            return sent.with_header(content=3)
        return sent.with_mask(encoding, Mask.empty(sent.update.patch.mask.size))

    outcome, _ = wire.run(send_nothing)
    *training, last = outcome.rounds
    assert all(record.abstained == ["site-2"] and record.rejected == {} and record.is_balanced for record in training)
    assert all(record.sites_contributed == ["site-1", "site-3"] for record in training)
    assert len(last.sites_contributed) == 3
    assert compute_digest(outcome.weights) == wire.compute_digest_without_site()


@pytest.mark.slow
@every_encoding
@pytest.mark.row(17)
def test_round_of_empty_updates_is_retried_and_then_fails(wire: Any, encoding: str) -> None:
    """The model stays as it is, the round is retried, and the run fails when every attempt is empty."""
    seen: dict[tuple[int, str], int] = {}

    def abstain_once(t: int, sent: Any) -> Any:
        seen[key] = seen.get(key := (t, sent.site), 0) + 1
        return sent.with_header(content=3) if t == 2 and seen[key] == 1 else sent

    all_sites = ("site-1", "site-2", "site-3")
    outcome, _ = wire.run(abstain_once, hostile=all_sites)
    assert [record.attempts for record in outcome.rounds] == [1, 2, 1]
    assert compute_digest(outcome.weights) == wire.compute_honest_digest()
    with pytest.raises(RoundFailed, match="0 of 3 sites contributed") as caught:
        wire.run(lambda t, sent: sent.with_header(content=3), hostile=all_sites, rules=RoundRules(retries=1))
    assert caught.value.code == "E_QUORUM"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora_a2", "flexlora", "hetlora", "ffa_lora"])
@pytest.mark.row(18)
def test_slots_other_than_the_sites_own_are_rejected(catalogue: Any, method: str) -> None:
    """Rank 0, too many, too few, different ranks of A and B, and part of a slot are wrong masks: E_MASK."""
    ranks = {} if method == "ffa_lora" else {"rank": 3, "ranks": {"site-2": 2}}
    wire = catalogue.MethodWire(method, task="Adapted", **ranks)
    slots = wire.build_method(1).slots
    uneven = (slots.select_first(2) & slots.factors["A"]) | (slots.select_first(1) & slots.factors["B"])
    wrong = [slots.other_entries, slots.select_first(slots.rank) | slots.other_entries, uneven | slots.other_entries]
    if method != "hetlora":  # whose sites may give up their last rank
        wrong.append(slots.select_first(1) | slots.other_entries)
    if method != "ffa_lora":  # whose sites send all of B
        wrong.append(slots.factors["B"] | slots.other_entries)
    wrong.append(slots.factors["A"] | slots.other_entries)

    def send_part_of_a_slot(sent: Any) -> Any:
        on = sent.update.patch.mask
        return sent.with_mask("bitmap", on - Mask(torch.arange(on.size) == int(on.indices[0])))

    wire.assert_rejects(
        *(("E_MASK", lambda sent, on=on: sent.with_mask("bitmap", on)) for on in wrong),
        ("E_MASK", send_part_of_a_slot),
    )


@pytest.mark.slow
@every_encoding
@pytest.mark.row(20)
def test_unknown_versions_and_flags_are_rejected(wire: Any, encoding: str) -> None:
    wire.assert_rejects(
        ("E_VERSION", lambda sent: with_bytes_at(sent, 0, b"FSPX")),
        ("E_VERSION", lambda sent: with_bytes_at(sent, 4, bytes([VERSION + 1, 0]))),
        ("E_VERSION", lambda sent: sent.with_header(encoding=99)),
        ("E_VERSION", lambda sent: sent.with_header(trainable=99)),
        ("E_VERSION", lambda sent: sent.with_header(content=9)),
        ("E_VERSION", lambda sent: sent.with_header(patch_base=9)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("values", list(FORMATS))
@pytest.mark.row(52)
def test_running_variance_below_zero_is_read_as_zero(values: Any) -> None:
    """A site that makes them up has the effect of one that sends zeros."""
    outcomes = [run_with_variances(values, variance) for variance in (-1e3, 0.0)]
    assert all(record.rejected == {} for outcome in outcomes for record in outcome.rounds)
    assert compute_digest(outcomes[0].weights) == compute_digest(outcomes[1].weights)
    assert outcomes[0].evaluation.overall == outcomes[1].evaluation.overall


def run_with_variances(values: Any, variance: float) -> Any:
    """Return the outcome of FedAvg in which one site sends the same number as every running variance."""
    federation = LocalFederation(
        "fedavg", ToyBench(Toy()), values=values, rounds=2, rules=RoundRules(max_norm_ratio=None)
    )
    variances = federation.method.layout.select(lambda spec: spec.name.endswith("running_var"))

    def change(upload: Upload) -> Upload:
        if upload.site != "site-2" or upload.update.content != "weights":
            return upload
        return upload.with_values(upload.update.patch.values.masked_fill(variances, variance))

    federation.change_update = change
    return federation.run()
