"""Values of few bits: bounded error, no bias, one form, differences to the receiver's vector, no trust in scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases

from flare_sparse.core.errors import MissingBase, RejectedMessage
from flare_sparse.core.exchange import Patch
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.wire.codec import Encoded, compute_min_message_bytes, decode, encode
from flare_sparse.wire.envelope import read_header, write_header
from flare_sparse.wire.formats import FORMATS, ValueType
from flare_sparse.wire.plan import Plan
from flare_sparse.wire.quantized import BLOCK

QUANTIZED: list[ValueType] = ["int8", "int4", "int2", "int1"]
AT_RANDOM = QUANTIZED[:3]
LAYOUT = Layout((TensorSpec("w", (20, 10), "weight"), TensorSpec("running_var", (6,), "buffer")))
SIZE = LAYOUT.size
VECTOR = torch.randn(SIZE, generator=torch.Generator().manual_seed(4))
FULL = Mask.full(SIZE)
WEIGHTS = slice(0, 200)
BITS = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
NUMBERS = st.floats(-(2.0**100), 2.0**100, width=32)


def build_plan(layout: Layout = LAYOUT, base_vector: torch.Tensor | None = None) -> Plan:
    base = None if base_vector is None else "5" * 16
    return Plan(
        layout,
        "0" * 16,
        base=base,
        base_vector=base_vector,
        target="7" * 16,
        request="9" * 16,
        sequence=7,
        round=3,
        kind="train",
    )


def send(
    vector: torch.Tensor, values: ValueType, plan: Plan | None = None, seed: int = 1, **options: object
) -> Encoded:
    """Return the message of a delta of all entries, or of the patch in ``options``."""
    plan = plan or build_plan()
    settings_: dict[str, object] = {"content": "delta", **options}
    patch = settings_.pop("patch", Patch.from_vector(vector, Mask.full(vector.numel())))
    generator = torch.Generator().manual_seed(seed)
    return encode(patch, plan, values=values, generator=generator, **settings_)  # type: ignore[arg-type]


def compute_steps(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return, for each value, the distance of the two numbers that it can be rounded to, a little too large."""
    blocks = torch.nn.functional.pad(values.abs(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    # A scale is the largest value, rounded up to 8 significant bits.
    return (2 * blocks.amax(1) * (1 + 2**-7) / (2**bits - 1)).repeat_interleave(BLOCK)[: values.numel()]


@pytest.mark.slow
@pytest.mark.parametrize("values", QUANTIZED)
@settings(max_examples=count_cases(60), deadline=None)
@given(data=st.data())
def test_error_is_below_one_step_and_becomes_the_residual(values: ValueType, data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 200))
    layout = Layout((TensorSpec("w", (size,), "weight"),))
    vector, before = (torch.tensor(data.draw(st.lists(NUMBERS, min_size=size, max_size=size))) for _ in range(2))
    mask = Mask(torch.tensor(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool))
    plan = build_plan(layout)
    message = send(vector, values, plan, patch=Patch.from_vector(vector, mask), residual=before)
    back = decode(message.data, plan)
    target = mask.take(vector + before)
    error = target - back.patch.values
    assert ((error.abs() < compute_steps(target, BITS[values]) * (1 + 1e-5)) | (error.abs() < 2**-99)).all()
    assert message.residual is not None
    assert torch.equal(message.residual, mask.put(error, before.clone()))
    assert message.received is not None
    assert torch.equal(message.received, back.patch.values)
    assert (back.values, back.is_difference) == (values, False)


@pytest.mark.parametrize(("values", "bits"), BITS.items())
@given(rounded=st.integers(0, 300), exact=st.integers(0, 20), selection=st.integers(0, 200))
@settings(max_examples=count_cases(40), deadline=None)
def test_length_is_that_of_the_format_page(
    values: ValueType, bits: int, rounded: int, exact: int, selection: int
) -> None:
    layout = Layout((TensorSpec("w", (rounded,), "weight"), TensorSpec("mean", (exact,), "buffer")))
    message = send(torch.ones(layout.size), values, build_plan(layout))
    section = 8 + 4 * exact + 2 * -(-rounded // 64) + -(-rounded * bits // 8)
    assert message.values_bytes == section
    assert message.payload_bytes == 128 + -(-section // 8) * 8
    assert compute_min_message_bytes(layout.size, values) <= message.payload_bytes


@pytest.mark.parametrize("values", AT_RANDOM)
def test_rounding_is_right_on_average(values: ValueType) -> None:
    """The mean over 4,000 seeds is within 5 standard errors of every value."""
    repeats, vector = 4000, VECTOR[:BLOCK]
    layout = Layout((TensorSpec("w", (BLOCK * repeats,), "weight"),))
    back = decode(send(vector.repeat(repeats), values, build_plan(layout)).data, build_plan(layout)).patch.values
    means = back.view(repeats, BLOCK).mean(0)
    # A number rounded to one of two with the distance s has a standard deviation of at most s / 2.
    assert ((means - vector).abs() < 5 * compute_steps(vector, BITS[values]) / 2 / repeats**0.5).all()
    assert back.view(repeats, BLOCK).unique(dim=0).shape[0] > 100


@pytest.mark.slow
@pytest.mark.parametrize("values", AT_RANDOM)
def test_error_feedback_sends_every_value_in_the_end(values: ValueType) -> None:
    """The residual stays below its bound, so the mean of what arrives approaches the truth as 1 / rounds."""
    truth, residual, total = VECTOR.clone(), None, torch.zeros(SIZE)
    for seed in range(200):
        message = send(truth, values, seed=seed, residual=residual)
        assert message.received is not None
        residual, total = message.residual, total + message.received
        assert residual is not None
        bound = 2 / (2 ** BITS[values] - 3) * truth.abs().max() * 1.02
        assert residual.abs().max() < bound
    assert ((total / 200 - truth).abs() <= bound / 200 + 1e-5).all()


@settings(max_examples=count_cases(60), deadline=None)
@given(data=st.data(), size=st.integers(1, 150))
def test_one_bit_is_the_sign_and_the_mean_magnitude_of_a_block(data: st.DataObject, size: int) -> None:
    layout = Layout((TensorSpec("w", (size,), "weight"),))
    vector = torch.tensor(data.draw(st.lists(NUMBERS, min_size=size, max_size=size)))
    message = send(vector, "int1", build_plan(layout))
    received = decode(message.data, build_plan(layout)).patch.values
    for start in range(0, size, BLOCK):
        own, arrived = vector[start : start + BLOCK], received[start : start + BLOCK]
        mean = float(own.double().abs().mean())
        if mean < 2.0**-101:
            assert not arrived.any()
        elif mean > 2.0**-99:
            assert arrived.abs().unique().numel() == 1
            # bfloat16 has 8 significant bits.
            assert float(arrived[0].abs()) == pytest.approx(mean, rel=2.0**-8)
            assert torch.equal(arrived > 0, own >= 0)


@pytest.mark.slow
def test_error_feedback_of_one_bit_sends_every_value_in_the_end() -> None:
    """The residual stays bounded, so the mean of what arrives approaches the truth as 1 / rounds."""
    truth, residual, total, sizes = VECTOR[WEIGHTS].clone(), None, torch.zeros(200), []
    layout = Layout((TensorSpec("w", (200,), "weight"),))
    for _ in range(1000):
        message = send(truth, "int1", build_plan(layout), residual=residual)
        assert message.received is not None
        residual, total = message.residual, total + message.received
        assert residual is not None
        sizes.append(float(residual.norm()))
    # A message leaves at most 63 of 64 of the energy, so that the norm is below 127 times that of a delta.
    assert max(sizes) < 20 * float(truth.norm())
    assert torch.allclose(total / 1000 - truth, -residual / 1000, atol=1e-4)


def test_buffers_are_exact_and_have_no_residual() -> None:
    """A running variance rounded below 0 would give NaN."""
    message = send(VECTOR, "int2")
    assert message.received is not None
    assert torch.equal(message.received[200:], VECTOR[200:])
    assert message.residual is not None
    assert not message.residual[200:].any()
    few = Mask(torch.arange(SIZE) % 3 == 0)
    back = decode(send(VECTOR, "int2", patch=Patch.from_vector(VECTOR, few)).data, build_plan()).patch
    assert torch.equal(back.to_vector()[200:], few.put(few.take(VECTOR), torch.zeros(SIZE))[200:])


@pytest.mark.parametrize("values", AT_RANDOM)
def test_same_seed_gives_the_same_bytes_and_another_seed_others(values: ValueType) -> None:
    first, again, other = (send(VECTOR, values, seed=seed).data.tobytes() for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("values", QUANTIZED)
@pytest.mark.parametrize("base", ["zeros", "previous"])
def test_weights_are_sent_as_differences_to_the_vector_of_the_receiver(values: ValueType, base: str) -> None:
    held = VECTOR + 0.01 * torch.randn(SIZE, generator=torch.Generator().manual_seed(5))
    plan = build_plan(base_vector=held)
    mask = Mask(torch.arange(SIZE) % 2 == 0)
    patch = Patch.from_vector(VECTOR, mask, base)  # type: ignore[arg-type]
    message = send(VECTOR, values, plan, patch=patch, content="weights")
    back = decode(message.data, plan)
    assert (back.is_difference, back.patch.base, back.values) == (True, base, values)
    assert message.received is not None
    assert torch.equal(back.patch.values, message.received)
    error = (back.patch.values - mask.take(VECTOR))[:100].abs()
    assert (error <= compute_steps(mask.take(VECTOR - held)[:100], BITS[values]) + 1e-6).all()
    for other in (build_plan(), replace(plan, base="4" * 16), replace(plan, base_vector=None)):
        with pytest.raises(MissingBase, match="E_NOT_HELD"):
            decode(message.data, other)


@pytest.mark.parametrize("values", QUANTIZED)
def test_weights_for_a_receiver_without_a_vector_have_8_bits(values: ValueType) -> None:
    message = send(VECTOR, values, content="weights")
    assert message.values == "int8"
    assert decode(message.data, build_plan()).values == "int8"


def test_only_weights_are_differences() -> None:
    plan = build_plan(base_vector=VECTOR)
    assert not decode(send(VECTOR, "int4", plan).data, plan).is_difference
    data = send(VECTOR, "int4", plan).data
    write_header(replace(read_header(data), patch_base=2, base="5" * 16), data)
    with pytest.raises(RejectedMessage, match=r"E_VERSION.*base"):
        decode(data, plan)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_values_that_the_format_cannot_hold_are_not_sent(value: float) -> None:
    for entry in (0, 3):
        vector = VECTOR.clone()
        vector[entry] = value
        with pytest.raises(RejectedMessage, match="E_FINITE"):
            send(vector, "int4")
        assert not FORMATS["int4"].can_hold(vector)
    assert FORMATS["int4"].can_hold(VECTOR)


def test_quantized_values_need_a_generator() -> None:
    with pytest.raises(ValueError, match="generator: values are rounded"):
        encode(Patch.from_vector(VECTOR, FULL), build_plan(), values="int4", content="delta")


def test_values_too_small_for_a_scale_stay_in_the_residual() -> None:
    layout = Layout((TensorSpec("w", (BLOCK,), "weight"),))
    tiny = torch.full((BLOCK,), 1e-40)
    message = send(tiny, "int4", build_plan(layout))
    assert message.received is not None
    assert not message.received.any()
    assert message.residual is not None
    assert torch.equal(message.residual, tiny)


def forge(data: np.ndarray, offset: int, replacement: bytes) -> np.ndarray:
    """Return a message with other bytes at an offset in its values section and valid checksums."""
    forged, header = data.copy(), read_header(data)
    start = header.values_start + offset
    forged[start : start + len(replacement)] = np.frombuffer(replacement, np.uint8)
    write_header(header, forged)
    return forged


SCALES = 8 + 4 * 6
CODES = SCALES + 2 * 4


@pytest.mark.parametrize(
    ("offset", "replacement", "code"),
    [
        (SCALES, b"\x80\x7f", "E_FINITE"),
        (SCALES + 2, b"\xc0\x7f", "E_FINITE"),
        (SCALES, b"\x80\xff", "E_RANGE"),
        (SCALES + 6, b"\x00\x80", "E_RANGE"),
        (SCALES, b"\x00\x00", "E_CANON"),
        (8, b"\x00\x00\x80\x7f", "E_FINITE"),
        (0, (5).to_bytes(8, "little"), "E_CANON"),
        (0, (7).to_bytes(8, "little"), "E_NNZ"),
        (0, (40).to_bytes(8, "little"), "E_LEN"),
        (0, (207).to_bytes(8, "little"), "E_SIZE"),
        (0, b"\xff" * 8, "E_SIZE"),
    ],
)
def test_forged_sections_are_refused(offset: int, replacement: bytes, code: str) -> None:
    data = send(VECTOR, "int4").data
    with pytest.raises(RejectedMessage, match=code):
        decode(forge(data, offset, replacement), build_plan())


def test_padding_bits_of_the_codes_are_zero() -> None:
    layout = Layout((TensorSpec("w", (3,), "weight"),))
    data = send(torch.ones(3), "int2", build_plan(layout)).data
    last = int(data[128 + 8 + 2])
    with pytest.raises(RejectedMessage, match="E_CANON"):
        decode(forge(data, 10, bytes([last | 0xC0])), build_plan(layout))


def test_sum_with_the_base_that_overflows_is_refused() -> None:
    layout = Layout((TensorSpec("w", (2,), "weight"),))
    plan = build_plan(layout, torch.full((2,), -9e37))
    data = send(torch.full((2,), -8e37), "int8", plan, content="weights").data
    largest = forge(data, 8, b"\x7f\x7f")
    assert torch.isfinite(decode(largest, plan).patch.values).all()
    with pytest.raises(RejectedMessage, match="E_FINITE"):
        decode(largest, replace(plan, base_vector=torch.full((2,), 3e38)))
