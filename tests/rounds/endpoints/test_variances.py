"""No message makes a running variance negative: neither a rounding residual nor a hostile sender."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from local_federation import LocalFederation
from thoroughness import count_cases
from toy import Toy, ToyBench

from flare_sparse.core.exchange import Assignment, Patch, Request, UpdateSpec
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.rounds.endpoints.plans import correct_variances
from flare_sparse.wire.codec import decode, encode
from flare_sparse.wire.formats import FORMATS
from flare_sparse.wire.plan import Plan

LAYOUT = Layout((TensorSpec("1.weight", (4,), "norm"), TensorSpec("1.running_var", (4,), "buffer")))
PLAN = Plan(LAYOUT, "0" * 16, target="7" * 16, request="9" * 16, sequence=7, round=3, kind="train")

VARIANCES = ToyBench(Toy()).layout.select(lambda spec: spec.name.endswith("running_var"))


def send(vector: torch.Tensor, values: Any, residual: torch.Tensor | None = None) -> Any:
    patch = Patch.from_vector(vector, Mask.full(LAYOUT.size))
    return encode(patch, PLAN, values=values, residual=residual, generator=torch.Generator().manual_seed(1))


def receive(message: Any) -> torch.Tensor:
    return correct_variances(decode(message.data, PLAN).patch, LAYOUT).values


@pytest.mark.slow
@pytest.mark.parametrize("values", FORMATS)
@given(st.lists(st.lists(st.floats(2.0**-14, 100, width=32), min_size=8, max_size=8), min_size=2, max_size=4))
@settings(max_examples=count_cases(60), deadline=None)
def test_error_feedback_never_yields_a_negative_variance(values: Any, models: list[list[float]]) -> None:
    residual = None
    for model in models:
        message = send(torch.tensor(model), values, residual)
        residual, sent = message.residual, decode(message.data, PLAN).patch.values
        received = receive(message)
        assert torch.equal(received[:4], sent[:4])
        assert torch.equal(received[4:], sent[4:].clamp(min=0))


@pytest.mark.parametrize("values", ["bfloat16", "bfloat16_zstd", "float16"])
def test_residual_of_a_large_variance_does_not_make_a_small_one_negative(values: Any) -> None:
    """A channel that dies: its variance falls to next to nothing, and the residual of the old one is negative."""
    first = send(torch.full((8,), 0.3), values)
    assert (first.residual < -1e-5).all()
    received = receive(send(torch.full((8,), 1e-6), values, first.residual))
    assert (received[:4] < -1e-5).all()
    assert received[4:].tolist() == [0.0] * 4


@pytest.mark.parametrize("values", FORMATS)
def test_site_reads_negative_variances_as_zero(values: Any) -> None:
    """Again if the message is delivered again: reading it changes nothing in it."""
    federation = LocalFederation("fedavg", ToyBench(Toy()), values=values)
    vector = federation.bench.weights.masked_fill(VARIANCES, -2.0)
    patch = Patch.from_vector(vector, Mask.full(vector.numel()))
    request = Request("train", 1, patch, patch.mask)
    attempt = federation.server.encode_requests({"site-1": Assignment(request, UpdateSpec(mask=patch.mask))})
    before = attempt.messages["site-1"].copy()
    received = federation.endpoints["site-1"].receive(attempt.messages["site-1"])
    weights = federation.endpoints["site-1"].site.weights
    assert (weights[VARIANCES] == 0).all()
    assert torch.equal(received.model.to_vector(), weights)
    assert (attempt.messages["site-1"] == before).all()
