"""Every encoding and number format: what is written is read back bit for bit. Thirteen properties, 500 cases each."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_sparse.errors import WireError
from flare_sparse.exchange import Patch
from flare_sparse.mask import Mask
from flare_sparse.params import Layout, TensorSpec
from flare_sparse.wire.codec import decode, encode
from flare_sparse.wire.encoding_choice import choose_encoding, compute_selection_entropy
from flare_sparse.wire.encodings import ENCODINGS
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.plan import Plan, ValueType

RUN = "0123456789abcdef"
CASES = 500
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4)


def thorough(property_: Callable[..., None]) -> Callable[..., None]:
    """The property holds in ``CASES`` cases, which are counted, not believed."""
    inner, cases = property_.hypothesis.inner_test, 0  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def counting(*arguments: Any, **named: Any) -> None:
        nonlocal cases
        inner(*arguments, **named)
        cases += 1

    property_.hypothesis.inner_test = counting  # type: ignore[attr-defined]
    repeated = settings(max_examples=CASES, deadline=None)(property_)

    @functools.wraps(repeated)
    def run(*arguments: Any, **named: Any) -> None:
        nonlocal cases
        cases = 0
        repeated(*arguments, **named)
        assert cases >= CASES, cases

    return run


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(tuple(TensorSpec(f"t{i}", shape, "weight") for i, shape in enumerate(draw(SHAPES))))


@st.composite
def selections(draw: st.DrawFn, size: int) -> Mask:
    kind = draw(st.sampled_from(["empty", "full", "random"]))
    if kind == "random":
        drawn = np.frombuffer(draw(st.binary(min_size=-(-size // 8), max_size=-(-size // 8))), np.uint8)
        return Mask(torch.from_numpy(np.unpackbits(drawn, count=size).astype(bool)))
    return Mask.full(size) if kind == "full" else Mask.empty(size)


def plan(layout: Layout, known: Mask | None = None, base: int | None = None) -> Plan:
    return Plan(layout, RUN, base_mask=known, base_sequence=base, sequence=7, round=3, kind="train")


@thorough
@given(st.data(), layouts())
def test_a_message_comes_back_bit_for_bit(data: st.DataObject, layout: Layout) -> None:
    on, known = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    trainable = data.draw(st.none() | selections(layout.size))
    both = plan(layout, data.draw(st.sampled_from([None, known, on])), base=5)
    over = data.draw(st.sampled_from(["zeros", "previous"]))
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = torch.tensor(data.draw(st.lists(numbers, min_size=on.count, max_size=on.count)), dtype=torch.float32)
    sent = encode(Patch(values, on, over), both, content="delta", trainable=trainable)
    back = decode(sent.data, replace(both, sequence=None, round=None, kind=None), "site-1")
    assert back.patch.values.view(torch.int32).tolist() == values.view(torch.int32).tolist()
    assert (back.patch.mask, back.patch.base, back.content, back.trainable) == (on, over, "delta", trainable)
    assert (back.kind, back.round, back.sequence) == ("train", 3, 7)
    assert sent.floor_bytes <= sent.payload_bytes
    assert decode(sent.data.tobytes(), both).patch.mask == on


@pytest.mark.parametrize("name", ENCODINGS)
@thorough
@given(data=st.data(), layout=layouts())
def test_each_encoding_says_what_it_can_exactly(name: str, data: st.DataObject, layout: Layout) -> None:
    encoding, known = ENCODINGS[name], data.draw(selections(layout.size))
    on = data.draw(selections(layout.size))
    on = {"dense": Mask.full(layout.size), "shared": known, "shrink": on & known}.get(name, on)
    least = encoding.min_bytes(on, known, layout)
    assert least is not None
    raw = encoding.encode(on, known, layout)
    if raw is None:
        assert name == "slices"
        return
    assert len(raw) >= least
    assert encoding.decode(np.frombuffer(raw, np.uint8), known, layout) == on


@thorough
@given(st.data(), layouts())
def test_the_codec_picks_the_fewest_bytes(data: st.DataObject, layout: Layout) -> None:
    on, known = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    able = [e for e in ENCODINGS.values() if e.min_bytes(on, known, layout) is not None]
    sizes = [len(raw) for e in able if (raw := e.encode(on, known, layout)) is not None]
    assert len(choose_encoding(on, known, layout)[1]) == min(sizes)


@thorough
@given(st.data(), layouts(), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_a_message_has_one_form(data: st.DataObject, layout: Layout, values: ValueType) -> None:
    """What was read is written again as the same bytes, and their number is the formula's.

    Away from zero: a short format's -0 comes back as 0 when it is sent on, since a residual of 0 is added to it.
    """
    on, known = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    both = plan(layout, known)
    sent = encode(Patch.from_vector(torch.linspace(1, 2, layout.size), on), both, values=values)
    back = decode(sent.data, both)
    assert encode(back.patch, both, content=back.content, values=values).data.tobytes() == sent.data.tobytes()
    start = 8 * math.ceil((128 + sent.selection_bytes) / 8)
    assert sent.payload_bytes == start + 8 * math.ceil((4 if values == "float32" else 2) * on.count / 8)


DIFFERENT = {
    "layout": Layout((TensorSpec("another", (3,), "weight"),)),
    "run": "f" * 16,
    "sequence": 8,
    "round": 4,
    "kind": "score",
    "base_sequence": 6,
}


@thorough
@given(st.data(), layouts(), st.sampled_from(sorted(DIFFERENT)))
def test_it_is_read_only_under_the_plan_it_was_written_for(data: st.DataObject, layout: Layout, field: str) -> None:
    on = data.draw(selections(layout.size))
    both = plan(layout, base=5)
    sent = encode(Patch.from_vector(torch.ones(layout.size), on, "previous"), both)
    other = replace(both, **{field: DIFFERENT[field]})  # type: ignore[arg-type]
    with pytest.raises(WireError):
        decode(sent.data, other)


@thorough
@given(st.data(), layouts(), st.sampled_from(sorted(ENCODINGS)))
def test_what_was_cut_or_added_to_is_refused(data: st.DataObject, layout: Layout, name: str) -> None:
    """Of a selection's own bytes: an encoding reads exactly what it wrote, and nothing shorter or longer."""
    encoding, known = ENCODINGS[name], data.draw(selections(layout.size))
    on = {"dense": Mask.full(layout.size), "shared": known}.get(name, known & data.draw(selections(layout.size)))
    raw = encoding.encode(on, known, layout)
    if raw is None:
        assert name == "slices"
        return
    wrong = raw[: data.draw(st.integers(0, len(raw) - 1))] if raw and data.draw(st.booleans()) else raw + b"\0"
    with pytest.raises(WireError):
        encoding.decode(np.frombuffer(wrong, np.uint8), known, layout)


def test_csr_is_scipys() -> None:
    layout = Layout((TensorSpec("w", (6, 2, 4), "weight"),))
    on = Mask(torch.rand(48, generator=torch.Generator().manual_seed(1)) < 0.3)
    numbers = np.frombuffer(ENCODINGS["csr"].encode(on, None, layout) or b"", "<i4")
    oracle = scipy.sparse.csr_matrix(on.bits.numpy().reshape(6, 8))
    assert numbers[:7].tolist() == oracle.indptr.tolist()
    assert numbers[7:].tolist() == oracle.indices.tolist()


def test_channels_and_whole_tensors_cost_indices_only() -> None:
    layout = Layout((TensorSpec("conv", (8, 4, 3, 3), "weight"), TensorSpec("bias", (8,), "bias")))
    on = layout.unflatten(torch.zeros(layout.size, dtype=torch.bool))
    on["conv"][:, 2] = True
    on["bias"][:] = True
    encoding, raw = choose_encoding(Mask(layout.flatten(on)), None, layout)
    assert (encoding.name, len(raw)) == ("slices", 1 + 4 + 4 + 1)


@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_what_a_short_format_rounds_off_is_sent_later(values: str) -> None:
    """Error feedback: the mean of what arrives approaches the true value far below the format's resolution."""
    layout = Layout((TensorSpec("w", (64,), "weight"),))
    on = Mask(torch.arange(64) % 2 == 0)
    truth = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 1
    residual, total = None, torch.zeros(on.count)
    for _ in range(200):
        sent = encode(Patch.from_vector(truth, on), plan(layout), values=values, residual=residual)  # type: ignore[arg-type]
        arrived = decode(sent.data, plan(layout)).patch.values
        before = torch.zeros(64) if residual is None else residual
        residual = sent.residual
        assert residual is not None
        assert torch.equal(arrived + on.take(residual), on.take(truth) + on.take(before))
        assert not residual[~on.bits].any()
        total += arrived
    assert sent.payload_bytes < 128 + 64 + 2 * on.count
    assert (total / 200 - on.take(truth)).abs().max() < 1e-4


@pytest.mark.parametrize(("values", "precision"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
@thorough
@given(data=st.data(), layout=layouts())
def test_a_short_format_rounds_once_and_keeps_the_rest(
    values: ValueType, precision: torch.dtype, data: st.DataObject, layout: Layout
) -> None:
    on, known = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    numbers = st.floats(-60000, 60000, width=32)
    vector, before = (
        torch.tensor(data.draw(st.lists(numbers, min_size=layout.size, max_size=layout.size))) for _ in range(2)
    )
    sent = encode(Patch.from_vector(vector, on), plan(layout, known), values=values, residual=before * 1e-3)
    exact = on.take(vector) + on.take(before * 1e-3)
    arrived = decode(sent.data, plan(layout, known)).patch.values
    assert arrived.tolist() == exact.to(precision).float().tolist()
    assert sent.residual is not None
    assert torch.equal(sent.residual, on.put(exact - arrived, before * 1e-3))
    assert sent.payload_bytes < 128 + sent.selection_bytes + 2 * on.count + 16


def test_an_unaligned_or_read_only_buffer_is_copied_and_another_is_not() -> None:
    layout = Layout((TensorSpec("w", (5,), "weight"),))
    data = encode(Patch(torch.arange(5.0), Mask.full(5)), plan(layout)).data
    apart = np.zeros(data.size + 1, np.uint8)[1:]
    apart[:] = data
    frozen = data.copy()
    frozen.flags.writeable = False
    for buffer, shares in ((data, True), (apart, False), (frozen, False), (bytearray(data.tobytes()), None)):
        values = decode(buffer, plan(layout)).patch.values
        assert values.tolist() == [0, 1, 2, 3, 4]
        assert shares is None or np.shares_memory(values.numpy(), buffer) == shares


def test_the_floor_counts_both_selections_of_a_question() -> None:
    layout = Layout((TensorSpec("w", (4000,), "weight"),))
    on = Mask(torch.rand(4000, generator=torch.Generator().manual_seed(5)) < 0.5)
    few = on & Mask(torch.rand(4000, generator=torch.Generator().manual_seed(6)) < 0.2)
    sent = encode(Patch.from_vector(torch.ones(4000), on), plan(layout), trainable=few)
    assert sent.floor_bytes == 4 * on.count + compute_selection_entropy(on, None) + compute_selection_entropy(few, on)
    assert sent.floor_bytes <= 4 * on.count + sent.selection_bytes


def test_strided_values_are_sent_as_they_read() -> None:
    layout = Layout((TensorSpec("w", (3, 4), "weight"),))
    values = torch.arange(12.0).view(4, 3).t()[0]
    on = Mask(torch.tensor([1, 1, 1, 1] + [0] * 8, dtype=torch.bool))
    assert decode(encode(Patch(values, on), plan(layout)).data, plan(layout)).patch.values.tolist() == [0, 3, 6, 9]


def test_known_selections_cost_nothing_and_entropy_is_the_binomials() -> None:
    on = Mask(torch.arange(100) < 10)
    assert compute_selection_entropy(on, on) == 0
    assert compute_selection_entropy(on, None) == 6  # log2 C(100, 10) = 43.98 bits
    assert compute_selection_entropy(on, Mask(torch.arange(100) < 20)) == 3  # log2 C(20, 10) = 17.5 bits
    layout = Layout((TensorSpec("w", (100,), "weight"),))
    assert choose_encoding(on, on, layout) == (ENCODINGS["shared"], b"")


def test_the_ledger_has_a_line_for_each_message() -> None:
    layout, on = Layout((TensorSpec("w", (100,), "weight"),)), Mask(torch.arange(100) < 10)
    both, ledger = plan(layout, known=on), Ledger()
    sent = encode(Patch.from_vector(torch.ones(100), on), both)
    ledger.record_sent(sent, both, "site-1", "weights")
    ledger.record_received(decode(sent.data, both, "site-1"), both, "site-1", sent.payload_bytes)
    down, up = ledger.lines
    assert (down.direction, up.direction) == ("down", "up")
    assert replace(down, direction="up") == up
    assert (up.encoding, up.scalars_total, up.scalars_sent) == ("shared", 100, 10)
    assert (up.payload_bytes, up.selection_bytes, up.dense_bytes, up.floor_bytes) == (168, 0, 400, 40)
