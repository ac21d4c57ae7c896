"""An update and what it leaves add up to the delta and the residual before, whatever happens to the message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from torch import Tensor

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.mask import Mask, floor_fraction, top_k
from flare_sparse.rounds.streams.arrays import ArraySpec
from flare_sparse.rounds.streams.models import HeldModel, SentUpdate, decode_update, encode_update
from flare_sparse.rounds.streams.settings import StreamSettings
from flare_sparse.wire.formats import FORMATS

RUN = "0123456789abcdef"
SPECS = (
    ArraySpec("conv.weight", (4, 3), "float32", "numpy"),
    ArraySpec("norm.running_var", (2,), "float32", "numpy"),
    ArraySpec("head.bias", (6,), "float32", "numpy"),
)
BUFFERS = torch.tensor([False] * 12 + [True] * 2 + [False] * 6)
REQUEST = HeldModel(SPECS, torch.linspace(-1, 1, 20), target="7" * 16, request="9" * 16, round=3)
vectors = nps.arrays(np.float32, 20, elements=st.floats(-8, 8, width=16)).map(torch.from_numpy)


def encode(
    update: Tensor,
    settings: StreamSettings,
    residual: Tensor | None = None,
    missing: Sequence[str] = (),
    *,
    is_delta: bool = True,
) -> SentUpdate:
    return encode_update(update, REQUEST, residual, settings, run=RUN, kind="model", is_delta=is_delta, missing=missing)


def decode(sent: SentUpdate, request: HeldModel = REQUEST, *, is_delta: bool = True) -> Tensor:
    return decode_update(sent.encoded.data, request, run=RUN, kind="model", is_delta=is_delta)[2]


@given(vectors, vectors, st.floats(0.01, 1), st.sampled_from(["float32", "bfloat16", "int8", "float32_zstd"]))
def test_message_and_residual_add_up_to_delta_and_residual_before(
    delta: Any, before: Any, keep: Any, values: Any
) -> None:
    before = torch.where(BUFFERS, 0.0, before)
    settings = StreamSettings(keep, values)
    sent = encode(delta, settings, before)
    received = decode(sent)
    total = delta + (0 if settings.is_exact else before)
    residual = torch.zeros(20) if sent.residual is None else sent.residual
    if values.startswith("float32"):
        assert torch.equal((received + residual)[~BUFFERS], total[~BUFFERS])
    else:
        assert torch.allclose((received + residual)[~BUFFERS], total[~BUFFERS], atol=1e-5)
    assert not residual[BUFFERS].any()


@given(vectors, vectors, st.floats(0.01, 0.99))
def test_message_carries_exactly_the_largest_entries_and_all_running_statistics(
    delta: Any, before: Any, keep: Any
) -> None:
    before = torch.where(BUFFERS, 0.0, before)
    received = decode(encode(delta, StreamSettings(keep), before))
    total = delta + before
    # No delta leads to a running variance below 0.
    total = torch.where(BUFFERS, total.clamp(min=-REQUEST.vector), total)
    k = max(floor_fraction(keep, 18), 1)
    expected = top_k(total.abs(), k, Mask(~BUFFERS)) | Mask(BUFFERS)
    assert torch.equal(received, torch.where(expected.bits, total, 0.0))


@given(vectors, st.sampled_from(list(FORMATS)), st.floats(0.01, 1), st.booleans())
def test_no_update_leads_to_a_running_variance_below_0(update: Any, values: Any, keep: Any, is_delta: bool) -> None:
    update = update if is_delta else torch.where(BUFFERS, update.abs() / 8000, update)
    received = decode(encode(update, StreamSettings(keep, values), is_delta=is_delta), is_delta=is_delta)
    assert ((REQUEST.vector + received if is_delta else received)[BUFFERS] >= 0).all()


@given(vectors, st.floats(0.01, 1))
def test_without_error_feedback_nothing_is_kept(delta: Any, keep: Any) -> None:
    assert encode(delta, StreamSettings(keep, error_feedback=False), torch.ones(20)).residual is None


def test_mask_limits_what_travels_and_what_is_kept() -> None:
    delta = torch.arange(1.0, 21.0)
    sent = encode(delta, StreamSettings(0.5, mask=("head.*",)))
    assert decode(sent).tolist() == [0.0] * 17 + [18.0, 19.0, 20.0]
    assert sent.residual.tolist() == [0.0] * 14 + [15.0, 16.0, 17.0] + [0.0] * 3


def test_array_that_the_update_does_not_have_keeps_its_residual() -> None:
    delta = torch.zeros(20)
    delta[:12] = 1
    before = torch.zeros(20)
    before[14:] = 5
    sent = encode(delta, StreamSettings(0.5), before, missing=["head.bias", "norm.running_var"])
    assert decode(sent).tolist() == [1.0] * 6 + [0.0] * 14
    assert sent.residual.tolist() == [0.0] * 6 + [1.0] * 6 + [0.0] * 2 + [5.0] * 6


@given(vectors, st.floats(0.01, 1), st.sampled_from(["float32", "bfloat16"]), st.booleans())
def test_array_that_is_left_out_for_two_rounds_adds_nothing_to_its_residual(
    before: Any, keep: Any, values: Any, is_delta: Any
) -> None:
    head, settings = slice(14, 20), StreamSettings(keep, values, mask=("*",))
    memory = torch.where(BUFFERS, 0.0, before)
    # As align_arrays fills it: 0 where an array is missing, in weights as in a delta.
    update = torch.full((20,), 0.5)
    update[head] = 0
    for _ in range(2):
        sent = encode(update, settings, memory, ["head.bias"], is_delta=is_delta)
        unchanged = torch.zeros(6) if is_delta else REQUEST.vector[head]
        assert torch.equal(decode(sent, is_delta=is_delta)[head], unchanged)
        assert torch.equal(sent.residual[head], before[head])
        memory = sent.residual


def test_array_that_is_sent_again_arrives_as_it_was_trained() -> None:
    update, settings = REQUEST.vector.clone(), StreamSettings(0.5)
    update[14:] = 0
    memory = None
    for _ in range(2):
        memory = encode(update, settings, memory, ["head.bias"], is_delta=False).residual
    trained = REQUEST.vector + 0.125 * (torch.arange(20) >= 14)
    received = decode(encode(trained, settings, memory, is_delta=False), is_delta=False)
    assert torch.equal(received[14:], trained[14:])


def test_weights_are_the_model_of_the_receiver_plus_the_delta() -> None:
    """The site holds a model that lags behind the server's; what the server has not sent yet must not get lost."""
    weights = REQUEST.vector + torch.eye(20)[5]
    sent = encode_update(weights, REQUEST, None, StreamSettings(0.06), run=RUN, kind="model", is_delta=False)
    ahead = HeldModel(SPECS, torch.full((20,), 3.0), target="7" * 16, request="9" * 16, round=3)
    expected = torch.full((20,), 3.0)
    expected[5] += (weights - REQUEST.vector)[5]
    assert torch.equal(decode(sent, ahead, is_delta=False), expected)


@pytest.mark.parametrize("values", ["float32", "float32_zstd"])
def test_weights_arrive_with_their_bits_and_only_changed_ones_travel(values: Any) -> None:
    update = REQUEST.vector.clone()
    update[[1, 7]] = torch.tensor([0.0, 3.0])
    model = replace(REQUEST, vector=torch.where(torch.arange(20) == 1, -0.0, REQUEST.vector))
    for weights, count in ((update, 2), (update + 1, 20), (model.vector, 20)):
        sent = encode_update(weights, model, None, StreamSettings(1.0, values), run=RUN, kind="model", is_delta=False)
        assert sent.residual is None
        decoded, _, received = decode_update(sent.encoded.data, model, run=RUN, kind="model", is_delta=False)
        assert decoded.patch.mask.count == count
        assert torch.equal(received.view(torch.int32), weights.view(torch.int32))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_update_is_rejected(position: Any, flip: Any) -> None:
    sent = encode(torch.linspace(0, 1, 20), StreamSettings(0.3))
    data = sent.encoded.data.copy()
    data[position % data.size] ^= flip
    with pytest.raises(RejectedMessage):
        decode_update(data, REQUEST, run=RUN, kind="model", is_delta=True)


def test_update_of_another_request_is_rejected() -> None:
    sent = encode(torch.ones(20), StreamSettings(0.3))
    with pytest.raises(RejectedMessage, match="E_REPLAY"):
        decode(sent, HeldModel(SPECS, REQUEST.vector, target="8" * 16, request="9" * 16, round=3))
    with pytest.raises(RejectedMessage, match="E_ROUND"):
        decode(sent, HeldModel(SPECS, REQUEST.vector, target="7" * 16, request="9" * 16, round=4))
