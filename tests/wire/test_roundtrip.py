"""Every encoding and number format: decoding returns bit for bit what was encoded. 500 cases per property."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases

from flare_sparse.core.errors import WireError
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import decode, encode
from flare_sparse.wire.encodings import ENCODINGS, choose_encoding, compute_selection_entropy
from flare_sparse.wire.formats import ValueType
from flare_sparse.wire.ledger import Ledger
from flare_sparse.wire.plan import Plan

RUN = "0123456789abcdef"
CASES = count_cases(500)
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=4)


def check_thoroughly(property_: Callable[..., None]) -> Callable[..., None]:
    """Run a property in at least ``CASES`` cases and count them, since hypothesis may stop earlier."""
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


def build_plan(layout: Layout, base_mask: Mask | None = None) -> Plan:
    names = {"base": "5" * 16, "target": "7" * 16, "request": "9" * 16}
    return Plan(layout, RUN, base_mask=base_mask, **names, sequence=7, round=3, kind="train")


@pytest.mark.slow
@check_thoroughly
@given(st.data(), layouts())
def test_decoded_message_equals_encoded_message_bit_for_bit(data: st.DataObject, layout: Layout) -> None:
    mask, base_mask = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    trainable = data.draw(st.none() | selections(layout.size))
    plan = build_plan(layout, data.draw(st.sampled_from([None, base_mask, mask])))
    base = data.draw(st.sampled_from(["zeros", "previous"]))
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    values = torch.tensor(data.draw(st.lists(numbers, min_size=mask.count, max_size=mask.count)), dtype=torch.float32)
    sent = encode(Patch(values, mask, base), plan, content="delta", trainable=trainable)
    back = decode(sent.data, replace(plan, target=None, request=None, sequence=None, round=None, kind=None), "site-1")
    assert back.patch.values.view(torch.int32).tolist() == values.view(torch.int32).tolist()
    assert (back.patch.mask, back.patch.base, back.content, back.trainable) == (mask, base, "delta", trainable)
    assert (back.header.kind, back.header.round, back.header.sequence) == ("train", 3, 7)
    assert sent.floor_bytes <= sent.payload_bytes
    assert decode(sent.data.tobytes(), plan).patch.mask == mask


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODINGS)
@check_thoroughly
@given(data=st.data(), layout=layouts())
def test_encoding_decodes_to_the_encoded_mask_and_respects_its_lower_bound(
    name: str, data: st.DataObject, layout: Layout
) -> None:
    encoding, base_mask = ENCODINGS[name], data.draw(selections(layout.size))
    mask = data.draw(selections(layout.size))
    mask = {"dense": Mask.full(layout.size), "shared": base_mask, "shrink": mask & base_mask}.get(name, mask)
    min_bytes = encoding.compute_min_bytes(mask, base_mask, layout)
    section = encoding.encode(mask, base_mask, layout)
    if section is None:
        assert name == "slices" or 2 * mask.count > layout.size
        assert (min_bytes is None) == (name == "gaps")
        return
    assert min_bytes is not None
    assert len(section) >= min_bytes
    assert encoding.decode(np.frombuffer(section, np.uint8), base_mask, layout) == mask


@pytest.mark.slow
@check_thoroughly
@given(st.data(), layouts())
def test_encoder_takes_the_encoding_with_the_fewest_bytes(data: st.DataObject, layout: Layout) -> None:
    mask, base_mask = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    candidates = [e for e in ENCODINGS.values() if e.compute_min_bytes(mask, base_mask, layout) is not None]
    sizes = [len(section) for e in candidates if (section := e.encode(mask, base_mask, layout)) is not None]
    assert len(choose_encoding(mask, base_mask, layout)[1]) == min(sizes)


@pytest.mark.slow
@check_thoroughly
@given(st.data(), layouts(), st.sampled_from(["float32", "float16", "bfloat16"]))
def test_reencoding_a_decoded_message_gives_the_same_bytes(
    data: st.DataObject, layout: Layout, values: ValueType
) -> None:
    """A message has one form, and its length is that of docs/wire-format.md.

    The values are positive: a -0 in a short format would become 0, since a residual of 0 is added to it.
    """
    mask, base_mask = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    plan = build_plan(layout, base_mask)
    sent = encode(Patch.from_vector(torch.linspace(1, 2, layout.size), mask), plan, values=values)
    back = decode(sent.data, plan)
    assert encode(back.patch, plan, content=back.content, values=values).data.tobytes() == sent.data.tobytes()
    start = 8 * math.ceil((128 + sent.selection_bytes) / 8)
    assert sent.payload_bytes == start + 8 * math.ceil((4 if values == "float32" else 2) * mask.count / 8)


DIFFERENT = {
    "layout": Layout((TensorSpec("another", (3,), "weight"),)),
    "run": "f" * 16,
    "sequence": 8,
    "round": 4,
    "kind": "score",
    "base": "6" * 16,
    "target": "8" * 16,
    "request": "8" * 16,
}


@pytest.mark.slow
@check_thoroughly
@given(st.data(), layouts(), st.sampled_from(sorted(DIFFERENT)))
def test_message_is_refused_under_any_other_plan(data: st.DataObject, layout: Layout, field: str) -> None:
    mask = data.draw(selections(layout.size))
    plan = build_plan(layout)
    sent = encode(Patch.from_vector(torch.ones(layout.size), mask, "previous"), plan)
    other = replace(plan, **{field: DIFFERENT[field]})  # type: ignore[arg-type]
    with pytest.raises(WireError):
        decode(sent.data, other)


@pytest.mark.slow
@check_thoroughly
@given(st.data(), layouts(), st.sampled_from(sorted(ENCODINGS)))
def test_truncated_or_extended_section_is_refused(data: st.DataObject, layout: Layout, name: str) -> None:
    """An encoding decodes exactly the bytes that it wrote, nothing shorter or longer."""
    encoding, base_mask = ENCODINGS[name], data.draw(selections(layout.size))
    mask = {"dense": Mask.full(layout.size), "shared": base_mask}.get(
        name, base_mask & data.draw(selections(layout.size))
    )
    section = encoding.encode(mask, base_mask, layout)
    if section is None:
        assert name in ("slices", "gaps")
        return
    wrong = (
        section[: data.draw(st.integers(0, len(section) - 1))]
        if section and data.draw(st.booleans())
        else section + b"\0"
    )
    with pytest.raises(WireError):
        encoding.decode(np.frombuffer(wrong, np.uint8), base_mask, layout)


def test_channels_and_whole_tensors_need_only_their_indices() -> None:
    layout = Layout((TensorSpec("conv", (8, 4, 3, 3), "weight"), TensorSpec("bias", (8,), "bias")))
    bits = layout.unflatten(torch.zeros(layout.size, dtype=torch.bool))
    bits["conv"][:, 2] = True
    bits["bias"][:] = True
    encoding, section = choose_encoding(Mask(layout.flatten(bits)), None, layout)
    assert (encoding.name, len(section)) == ("slices", 1 + 4 + 4 + 1)


@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_error_feedback_sends_the_rounding_error_later(values: ValueType) -> None:
    """The mean of the decoded values approaches the true value far below the format's resolution."""
    layout = Layout((TensorSpec("w", (64,), "weight"),))
    mask = Mask(torch.arange(64) % 2 == 0)
    truth = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 1
    residual, total = None, torch.zeros(mask.count)
    for _ in range(200):
        sent = encode(Patch.from_vector(truth, mask), build_plan(layout), values=values, residual=residual)
        arrived = decode(sent.data, build_plan(layout)).patch.values
        before = torch.zeros(64) if residual is None else residual
        residual = sent.residual
        assert residual is not None
        assert torch.equal(arrived + mask.take(residual), mask.take(truth) + mask.take(before))
        assert not residual[~mask.bits].any()
        total += arrived
    assert sent.payload_bytes < 128 + 64 + 2 * mask.count
    assert (total / 200 - mask.take(truth)).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("values", "precision"), [("float16", torch.float16), ("bfloat16", torch.bfloat16)])
@check_thoroughly
@given(data=st.data(), layout=layouts())
def test_short_format_rounds_once_and_keeps_the_residual(
    values: ValueType, precision: torch.dtype, data: st.DataObject, layout: Layout
) -> None:
    mask, base_mask = data.draw(selections(layout.size)), data.draw(selections(layout.size))
    numbers = st.floats(-60000, 60000, width=32)
    vector, before = (
        torch.tensor(data.draw(st.lists(numbers, min_size=layout.size, max_size=layout.size))) for _ in range(2)
    )
    sent = encode(Patch.from_vector(vector, mask), build_plan(layout, base_mask), values=values, residual=before * 1e-3)
    exact = mask.take(vector) + mask.take(before * 1e-3)
    arrived = decode(sent.data, build_plan(layout, base_mask)).patch.values
    assert arrived.tolist() == exact.to(precision).float().tolist()
    assert sent.residual is not None
    assert torch.equal(sent.residual, mask.put(exact - arrived, before * 1e-3))
    assert sent.payload_bytes < 128 + sent.selection_bytes + 2 * mask.count + 16


def test_decode_copies_only_unaligned_or_read_only_buffers() -> None:
    layout = Layout((TensorSpec("w", (5,), "weight"),))
    data = encode(Patch(torch.arange(5.0), Mask.full(5)), build_plan(layout)).data
    apart = np.zeros(data.size + 1, np.uint8)[1:]
    apart[:] = data
    frozen = data.copy()
    frozen.flags.writeable = False
    for buffer, shares in ((data, True), (apart, False), (frozen, False), (bytearray(data.tobytes()), None)):
        values = decode(buffer, build_plan(layout)).patch.values
        assert values.tolist() == [0, 1, 2, 3, 4]
        assert shares is None or np.shares_memory(values.numpy(), buffer) == shares


def test_floor_counts_both_selections_of_a_request() -> None:
    layout = Layout((TensorSpec("w", (4000,), "weight"),))
    mask = Mask(torch.rand(4000, generator=torch.Generator().manual_seed(5)) < 0.5)
    few = mask & Mask(torch.rand(4000, generator=torch.Generator().manual_seed(6)) < 0.2)
    sent = encode(Patch.from_vector(torch.ones(4000), mask), build_plan(layout), trainable=few)
    assert sent.floor_bytes == 4 * mask.count + compute_selection_entropy(mask, None) + compute_selection_entropy(
        few, mask
    )
    assert sent.floor_bytes <= 4 * mask.count + sent.selection_bytes


def test_strided_values_are_encoded_in_logical_order() -> None:
    layout = Layout((TensorSpec("w", (3, 4), "weight"),))
    values = torch.arange(12.0).view(4, 3).t()[0]
    mask = Mask(torch.tensor([1, 1, 1, 1] + [0] * 8, dtype=torch.bool))
    assert decode(encode(Patch(values, mask), build_plan(layout)).data, build_plan(layout)).patch.values.tolist() == [
        0,
        3,
        6,
        9,
    ]


def test_entropy_is_zero_for_the_base_mask_and_binomial_otherwise() -> None:
    mask = Mask(torch.arange(100) < 10)
    assert compute_selection_entropy(mask, mask) == 0
    assert compute_selection_entropy(mask, None) == 6  # log2 C(100, 10) = 43.98 bits
    assert compute_selection_entropy(mask, Mask(torch.arange(100) < 20)) == 3  # log2 C(20, 10) = 17.5 bits
    layout = Layout((TensorSpec("w", (100,), "weight"),))
    assert choose_encoding(mask, mask, layout) == (ENCODINGS["shared"], b"")


def test_ledger_has_one_line_per_message() -> None:
    layout, mask = Layout((TensorSpec("w", (100,), "weight"),)), Mask(torch.arange(100) < 10)
    plan, ledger = build_plan(layout, base_mask=mask), Ledger()
    sent = encode(Patch.from_vector(torch.ones(100), mask), plan)
    ledger.record(plan, "site-1", "down", "weights", sent)
    ledger.record_received(decode(sent.data, plan, "site-1"), plan, "site-1", sent.payload_bytes)
    down, up = ledger.lines
    assert (down.direction, up.direction) == ("down", "up")
    assert replace(down, direction="up") == up
    assert (up.encoding, up.scalars_total, up.scalars_sent) == ("shared", 100, 10)
    assert (up.payload_bytes, up.selection_bytes, up.dense_bytes, up.floor_bytes) == (168, 0, 400, 40)
