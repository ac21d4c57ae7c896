"""Both ends hold the same model after every message; an update and what it leaves add up, whatever happens to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps
from pydantic import ValidationError
from thoroughness import count_cases
from torch import Tensor

from flare_sparse.core.errors import ConfigError, MissingBase, RejectedMessage
from flare_sparse.core.mask import Mask, floor_fraction, top_k
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.rounds.streams import Model, ServerStream, SiteStream, StreamSettings
from flare_sparse.wire.codec import Decoded, decode, read_names
from flare_sparse.wire.formats import FORMATS

RUN = "0123456789abcdef"
LAYOUT = Layout(
    (TensorSpec("conv.weight", (4, 3)), TensorSpec("head.bias", (6,)), TensorSpec("norm.running_var", (2,), "buffer"))
)
BUFFERS = torch.tensor([False] * 18 + [True] * 2)
START = torch.linspace(-1, 1, 20)
vectors = nps.arrays(np.float32, 20, elements=st.floats(-8, 8, width=16)).map(torch.from_numpy)


class Ends:
    """A server and a site that hold the same model."""

    def __init__(self, start: Tensor = START) -> None:
        self.server, self.site, self.round = ServerStream(RUN), SiteStream(RUN), 0
        assert self.send(start, StreamSettings()) is None

    def send(self, vector: Tensor, how: StreamSettings) -> np.ndarray | None:
        """Send a model, and return its message."""
        self.round += 1
        model = Model.from_vector(LAYOUT, vector, self.round, {})
        message, counted = self.server.encode(model, how, "site-1")
        received = model if message is None else self.site.decode(message, self.round)
        self.site.receive(received, counted)
        sent = self.server._sent["site-1"]
        assert torch.equal(self.held, sent.held.values)
        assert self.site.model.held.name == sent.held.name
        assert (self.held[BUFFERS] >= 0).all()
        return message

    @property
    def held(self) -> Tensor:
        return self.site.model.vector

    def train(self, update: Tensor, how: StreamSettings, missing: Sequence[str] = (), *, is_delta: bool = True) -> Any:
        """Return the message of an update."""
        return self.site.encode(update, how, is_delta=is_delta, missing=missing)

    def receive(self, message: np.ndarray, *, is_delta: bool = True) -> Tensor:
        return self.server.decode_update(message, "site-1", is_delta=is_delta)[1]

    def pass_on(
        self, update: Tensor, how: StreamSettings, missing: Sequence[str] = (), *, is_delta: bool = True
    ) -> Any:
        """Return what arrives of an update, and what the site keeps of it."""
        received = self.receive(self.train(update, how, missing, is_delta=is_delta), is_delta=is_delta)
        return received, list(self.site._link.answers.values())[-1].memory

    def begin(self, residual: Tensor, how: StreamSettings) -> None:
        """Let an update leave a residual, and send the same model again."""
        message = self.train(torch.zeros(20), how)
        self.receive(message)
        self.send(START, replace_settings(how))
        (name, answer), *_ = list(self.site._link.answers.items())[::-1]
        self.site._link = replace(self.site._link, answers={name: replace(answer, memory=residual)})


def replace_settings(how: StreamSettings) -> StreamSettings:
    return how.model_copy(update={"keep": 1.0, "values": "float32", "mask": None})


def read(message: np.ndarray, ends: Ends) -> Decoded:
    return decode(message, ends.site.model.build_answer_plan(RUN))


@given(vectors, vectors, st.floats(0.01, 1), st.sampled_from(["float32", "bfloat16", "int8", "float32_zstd"]))
def test_message_and_residual_add_up_to_delta_and_residual_before(
    delta: Any, before: Any, keep: Any, values: Any
) -> None:
    how, ends = StreamSettings(keep=keep, values=values), Ends()
    before = torch.where(BUFFERS, 0.0, before)
    ends.begin(before, how)
    received, residual = ends.pass_on(delta, how)
    total = delta + (0 if how.is_exact else before)
    residual = torch.zeros(20) if residual is None else residual
    if values.startswith("float32"):
        assert torch.equal((received + residual)[~BUFFERS], total[~BUFFERS])
    else:
        assert torch.allclose((received + residual)[~BUFFERS], total[~BUFFERS], atol=1e-5)
    assert not residual[BUFFERS].any()


@given(vectors, vectors, st.floats(0.01, 0.99))
def test_message_carries_exactly_the_largest_entries_and_all_running_statistics(
    delta: Any, before: Any, keep: Any
) -> None:
    how, ends = StreamSettings(keep=keep), Ends()
    before = torch.where(BUFFERS, 0.0, before)
    ends.begin(before, how)
    total = delta + before
    # No delta leads to a running variance below 0.
    total = torch.where(BUFFERS, total.clamp(min=-START), total)
    k = max(floor_fraction(keep, 18), 1)
    expected = top_k(total.abs(), k, Mask(~BUFFERS)) | Mask(BUFFERS)
    assert torch.equal(ends.pass_on(delta, how)[0], torch.where(expected.bits, total, 0.0))


@given(vectors, st.sampled_from(list(FORMATS)), st.floats(0.01, 1), st.booleans())
def test_no_update_leads_to_a_running_variance_below_0(update: Any, values: Any, keep: Any, is_delta: bool) -> None:
    update = update if is_delta else torch.where(BUFFERS, update.abs() / 8000, update)
    received, _ = Ends().pass_on(update, StreamSettings(keep=keep, values=values), is_delta=is_delta)
    assert ((START + received if is_delta else received)[BUFFERS] >= 0).all()


@given(vectors, st.floats(0.01, 1))
def test_without_error_feedback_nothing_is_kept(delta: Any, keep: Any) -> None:
    assert Ends().pass_on(delta, StreamSettings(keep=keep, error_feedback=False))[1] is None


def test_mask_limits_what_travels_and_what_is_kept() -> None:
    received, residual = Ends().pass_on(torch.arange(1.0, 21.0), StreamSettings(keep=0.5, mask=("head.*",)))
    assert received.tolist() == [0.0] * 15 + [16.0, 17.0, 18.0] + [0.0] * 2
    assert residual.tolist() == [0.0] * 12 + [13.0, 14.0, 15.0] + [0.0] * 5


def test_array_that_the_update_does_not_have_keeps_its_residual() -> None:
    how, ends, delta = StreamSettings(keep=0.5), Ends(), torch.zeros(20)
    delta[:12] = 1
    ends.begin(torch.where(torch.arange(20) < 12, 0.0, 5.0), how)
    received, residual = ends.pass_on(delta, how, ["head.bias", "norm.running_var"])
    assert received.tolist() == [1.0] * 6 + [0.0] * 14
    assert residual.tolist() == [0.0] * 6 + [1.0] * 6 + [5.0] * 6 + [0.0] * 2


@given(vectors, st.floats(0.01, 1), st.sampled_from(["float32", "bfloat16"]), st.booleans())
def test_array_that_is_left_out_for_two_rounds_adds_nothing_to_its_residual(
    before: Any, keep: Any, values: Any, is_delta: Any
) -> None:
    head, how, ends = slice(12, 18), StreamSettings(keep=keep, values=values, mask=("*",)), Ends()
    ends.begin(torch.where(BUFFERS, 0.0, before), how)
    # 0 where an array is missing, in weights as in a delta.
    update = torch.full((20,), 0.5)
    update[head] = 0
    for _ in range(2):
        received, residual = ends.pass_on(update, how, ["head.bias"], is_delta=is_delta)
        assert torch.equal(received[head], torch.zeros(6) if is_delta else START[head])
        assert torch.equal(residual[head], before[head])
        ends.send(START, replace_settings(how))


def test_array_that_is_sent_again_arrives_as_it_was_trained() -> None:
    how, ends, update = StreamSettings(keep=0.5), Ends(), START.clone()
    update[12:18] = 0
    for _ in range(2):
        ends.pass_on(update, how, ["head.bias"], is_delta=False)
        ends.send(START, replace_settings(how))
    trained = START + 0.125 * (torch.arange(20) >= 12)
    assert torch.equal(ends.pass_on(trained, how, is_delta=False)[0][12:18], trained[12:18])


def test_weights_are_the_model_of_the_server_plus_the_delta() -> None:
    """The site holds a model that lags behind the server's; what the server has not sent yet must not get lost."""
    how, ends = StreamSettings(keep=0.06), Ends()
    ends.pass_on(torch.zeros(20), how)
    ahead = START + torch.arange(20) / 20
    ends.send(ahead, how)
    assert not torch.equal(ends.held, ahead)
    received, _ = ends.pass_on(ends.held + torch.eye(20)[5], how, is_delta=False)
    assert torch.allclose(received, ahead + torch.eye(20)[5])


@pytest.mark.parametrize("values", ["float32", "float32_zstd"])
def test_weights_arrive_with_their_bits_and_only_changed_ones_travel(values: Any) -> None:
    changed, how = START.clone().abs(), StreamSettings(values=values)
    changed[[1, 7]] = torch.tensor([0.0, 3.0])
    minus = torch.where(torch.arange(20) == 1, -0.0, changed)
    for weights, count in ((changed, 2), (changed + 1, 20), (START.abs(), 20), (minus, 2)):
        ends = Ends(START.abs())
        message = ends.train(weights, how, is_delta=False)
        assert read(message, ends).patch.mask.count == count
        received = ends.receive(message, is_delta=False)
        assert torch.equal(received.view(torch.int32), weights.view(torch.int32))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_damaged_message_is_rejected_and_changes_nothing(position: Any, flip: Any) -> None:
    how, ends = StreamSettings(keep=0.3), Ends()
    message = ends.train(torch.linspace(0, 1, 20), how)
    broken = message.copy()
    broken[position % broken.size] ^= flip
    with pytest.raises(RejectedMessage):
        ends.receive(broken)
    ends.receive(message)
    model = Model.from_vector(LAYOUT, START + 1, 2, {})
    task = ends.server.encode(model, how, "site-1")[0]
    assert task is not None
    broken = task.copy()
    broken[position % broken.size] ^= flip
    with pytest.raises((RejectedMessage, MissingBase)):
        ends.site.decode(broken, 2)
    assert torch.equal(ends.held, START)


def test_update_of_another_request_is_rejected() -> None:
    how, ends = StreamSettings(keep=0.3), Ends()
    message = ends.train(torch.ones(20), how)
    for vector, code in ((START + 1, "E_REPLAY"), (START, "E_ROUND")):
        ends.server.encode(Model.from_vector(LAYOUT, vector, 2, {}), how, "site-1")
        with pytest.raises(RejectedMessage, match=code):
            ends.receive(message)
    with pytest.raises(RejectedMessage, match="E_NOT_HELD"):
        SiteStream(RUN).encode(torch.ones(20), how)


@pytest.mark.slow
@settings(max_examples=count_cases(20))
@given(
    st.floats(0.1, 1),
    st.sampled_from(["float32", "bfloat16", "int4", "int2", "int1", "bfloat16_zstd"]),
    vectors,
)
def test_both_ends_hold_the_same_bits_and_the_model_arrives_in_the_end(keep: Any, values: Any, target: Any) -> None:
    how, ends = StreamSettings(keep=keep, values=values), Ends()
    target = torch.where(BUFFERS, target.abs(), target)
    first = (target - START).norm()
    for _ in range(80):
        ends.pass_on(torch.zeros(20), how)
        assert ends.send(target, how) is not None
    # What a message leaves out is in the difference of the next one: error feedback without a residual.
    assert (target - ends.held).norm() <= 0.02 * first


def test_exact_settings_deliver_every_model_with_its_bits() -> None:
    how, ends = StreamSettings(values="float32_zstd"), Ends()
    for seed in range(3):
        ends.pass_on(ends.held + 1, how, is_delta=False)
        target = torch.randn(20, generator=torch.Generator().manual_seed(seed)).abs()
        assert ends.send(target, how) is not None
        assert torch.equal(ends.held, target)


def test_difference_has_the_share_of_entries_and_all_running_statistics() -> None:
    how, ends = StreamSettings(keep=0.2), Ends()
    assert read(ends.train(torch.arange(20.0), how), ends).patch.mask.count == 3 + 2
    ends.pass_on(torch.zeros(20), how)
    ends.send(START + torch.arange(20.0), how)
    assert int((ends.held != START).sum()) == 3 + 2


def test_site_that_did_not_answer_gets_the_whole_model() -> None:
    how, ends = StreamSettings(keep=0.2), Ends()
    assert ends.send(START + 1, how) is None
    ends.pass_on(torch.zeros(20), how)
    assert ends.send(START + 2, how) is not None
    assert ends.send(START + 3, how) is None


def test_sites_that_hold_the_same_model_share_a_message() -> None:
    server, how = ServerStream(RUN), StreamSettings(keep=0.2)
    first = Model.from_vector(LAYOUT, START, 1, {})
    for name in ("a", "b", "c"):
        server.encode(first, how, name)
    for name in ("a", "b"):
        site = SiteStream(RUN)
        site.receive(first, None)
        server.decode_update(site.encode(torch.zeros(20), how, is_delta=True), name, is_delta=True)
    messages = [server.encode(Model.from_vector(LAYOUT, START + 1, 2, {}), how, name)[0] for name in ("a", "b", "c")]
    assert messages[0] is messages[1] is not None
    assert messages[2] is None


def test_site_without_the_base_says_so_and_keeps_its_model() -> None:
    how, ends = StreamSettings(keep=0.2), Ends()
    ends.pass_on(torch.zeros(20), how)
    message = ends.server.encode(Model.from_vector(LAYOUT, START + 1, 2, {}), how, "site-1")[0]
    with pytest.raises(MissingBase):
        SiteStream(RUN).decode(message, 2)
    other = Ends(START + 7)
    with pytest.raises(MissingBase):
        other.site.decode(message, 2)
    assert torch.equal(other.held, START + 7)
    assert read_names(message).target != other.site.model.held.name


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"keep": 0}, "\nkeep\n"),
        ({"keep": 1.1}, "\nkeep\n"),
        ({"mask": ()}, "\nmask\n"),
        ({"values": "bfloat"}, "Did you mean 'bfloat16'"),
    ],
)
def test_invalid_setting_is_named(arguments: Any, field: Any) -> None:
    with pytest.raises((ValidationError, ConfigError), match=field):
        StreamSettings(**arguments)


def test_mask_that_names_no_array_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no array matches \['backbone.\*'\]; the arrays are conv.weight"):
        Ends().train(torch.ones(20), StreamSettings(mask=("backbone.*",)))


def test_a_restarted_site_goes_on_from_what_it_had_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    how, update, file = StreamSettings(keep=0.25), torch.linspace(-1, 2, 20), tmp_path / "left.safetensors"
    messages = []
    for restarts in (False, True):
        ends = Ends()
        ends.site = SiteStream(RUN, file)
        ends.send(START, how)
        for _ in range(3):
            ends.receive(ends.train(update, how))
            if restarts:
                ends.site = SiteStream(RUN, file)
                ends.server._link = ends.server._link.forget(["site-1"])
            ends.send(START, how)
        messages.append(ends.train(update, how).tobytes())
        file.rename(tmp_path / str(restarts))
    assert messages[0] == messages[1]
    for content in (b"", b"\xff" * 9, (tmp_path / "True").read_bytes()[:-3]):
        file.write_bytes(content)
        assert not SiteStream(RUN, file)._link.answers
        assert "left.safetensors is damaged" in caplog.text
        caplog.clear()
