"""Both ends hold the same model after every message, and a receiver of unknown state gets the whole one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import count_cases

from flare_sparse.core.errors import ConfigError, MissingBase, RejectedMessage
from flare_sparse.rounds.streams.arrays import Arrays, ArraySpec, read_specs, write_specs
from flare_sparse.rounds.streams.models import ModelReceiver, ModelSender, SentModel
from flare_sparse.rounds.streams.settings import StreamSettings

RUN = "0123456789abcdef"


def build_arrays(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    arrays = {
        "conv.weight": rng.normal(size=(30, 10)),
        "bn.running_var": rng.random(4),
        "head.bias": rng.normal(size=6),
    }
    return Arrays.from_mapping({name: array.astype(np.float32) for name, array in arrays.items()})


def send(sender: ModelSender, receiver: ModelReceiver, arrays: Arrays, round_: int, how: StreamSettings) -> SentModel:
    sent = sender.encode(arrays, round_, how, "site-1")
    receiver.decode(sent.encoded.data, sent.model.specs if sent.has_specs else None)
    assert receiver.held is not None
    assert torch.equal(receiver.held.vector, sent.received.values)
    assert receiver.held.target == sent.received.name == sent.model.target
    assert (receiver.held.vector[arrays.layout.select(lambda spec: spec.name.endswith("running_var"))] >= 0).all()
    return sent


@pytest.mark.slow
@settings(max_examples=count_cases(20))
@given(
    st.floats(0.05, 1),
    st.sampled_from(["float32", "bfloat16", "int4", "int2", "int1", "bfloat16_zstd"]),
    st.integers(0, 99),
)
def test_both_ends_hold_the_same_bits_and_the_model_arrives_in_the_end(keep: Any, values: Any, seed: Any) -> None:
    sender, receiver, target = ModelSender(RUN, "model"), ModelReceiver(RUN, "model"), build_arrays(seed)
    how = StreamSettings(keep, values)
    send(sender, receiver, build_arrays(seed + 1), 0, how)
    first = (target.vector - receiver.held.vector).norm()
    for round_ in range(1, 60):
        sender.accept("site-1", "a" * 16)
        send(sender, receiver, target, round_, how)
    # What a message leaves out is in the difference of the next one: error feedback without a residual.
    assert (target.vector - receiver.held.vector).norm() < 0.02 * first


def test_exact_settings_deliver_every_model_with_its_bits() -> None:
    sender, receiver = ModelSender(RUN, "model"), ModelReceiver(RUN, "model")
    for round_ in range(3):
        send(sender, receiver, build_arrays(round_), round_, StreamSettings(values="float32_zstd"))
        assert torch.equal(receiver.held.vector, build_arrays(round_).vector)
        sender.accept("site-1", "a" * 16)


def test_delta_has_the_share_of_entries_and_all_running_statistics() -> None:
    sender, receiver = ModelSender(RUN, "model"), ModelReceiver(RUN, "model")
    assert send(sender, receiver, build_arrays(0), 0, StreamSettings(0.1)).encoded.scalars == 310
    sender.accept("site-1", "a" * 16)
    # 306 entries without the 4 of the running variance.
    assert send(sender, receiver, build_arrays(1), 1, StreamSettings(0.1)).encoded.scalars == 30 + 4


def test_receiver_that_did_not_answer_gets_the_whole_model() -> None:
    sender, receiver = ModelSender(RUN, "model"), ModelReceiver(RUN, "model")
    send(sender, receiver, build_arrays(0), 0, StreamSettings(0.1))
    assert send(sender, receiver, build_arrays(1), 1, StreamSettings(0.1)).has_specs
    sender.accept("site-1", "a" * 16)
    assert not send(sender, receiver, build_arrays(2), 2, StreamSettings(0.1)).has_specs
    sender.accept("site-1", "a" * 16)
    sender.forget("site-1")
    assert send(sender, receiver, build_arrays(3), 3, StreamSettings(0.1)).has_specs


def test_receivers_that_hold_the_same_model_share_a_message() -> None:
    sender = ModelSender(RUN, "model")
    first = [sender.encode(build_arrays(0), 0, StreamSettings(0.1), name) for name in ("a", "b")]
    assert first[0] is first[1]
    sender.accept("a", "a" * 16)
    later = {name: sender.encode(build_arrays(1), 1, StreamSettings(0.1), name) for name in ("a", "b")}
    assert [later["a"].encoded.scalars, later["b"].encoded.scalars] == [34, 310]
    assert sender.find_model(later["a"].model.target, "a") is later["a"].model
    assert sender.find_model(later["a"].model.target, "b") is None


def test_receiver_without_the_base_says_so_and_keeps_its_model() -> None:
    sender, receiver, restarted = ModelSender(RUN, "model"), ModelReceiver(RUN, "model"), ModelReceiver(RUN, "model")
    send(sender, receiver, build_arrays(0), 0, StreamSettings(0.1))
    sender.accept("site-1", "a" * 16)
    sent = sender.encode(build_arrays(1), 1, StreamSettings(0.1), "site-1")
    with pytest.raises(MissingBase):
        restarted.decode(sent.encoded.data, None)
    other = ModelSender(RUN, "model").encode(build_arrays(7), 0, StreamSettings(), "site-1")
    restarted.decode(other.encoded.data, other.model.specs)
    held = restarted.held
    with pytest.raises(MissingBase):
        restarted.decode(sent.encoded.data, None)
    assert restarted.held is held


def test_receiver_allocates_no_more_than_a_message_is_long() -> None:
    sent = ModelSender(RUN, "model").encode(build_arrays(0), 0, StreamSettings(values="float32_zstd"), "site-1")
    assert sent.encoded.values == "float32"
    huge = (ArraySpec("w", (2**30, 2**9), "float32", "numpy"),)
    with pytest.raises(RejectedMessage, match="E_SIZE"):
        ModelReceiver(RUN, "model").decode(sent.encoded.data, huge)


@given(st.integers(0, 100_000), st.integers(1, 255))
def test_damaged_model_is_rejected(position: Any, flip: Any) -> None:
    sent = ModelSender(RUN, "model").encode(build_arrays(0), 0, StreamSettings(), "site-1")
    data = sent.encoded.data.copy()
    data[position % data.size] ^= flip
    receiver = ModelReceiver(RUN, "model")
    with pytest.raises(RejectedMessage):
        receiver.decode(data, sent.model.specs)
    assert receiver.held is None


def test_arrays_return_with_their_names_shapes_and_types() -> None:
    arrays = {
        "a": np.arange(6, dtype=np.float64).reshape(2, 3),
        "b": torch.ones(2, dtype=torch.bfloat16),
        "c": np.array(0.5, np.float16),
        "d": np.zeros((0, 3), np.float32),
    }
    restored = Arrays.from_mapping(arrays).to_mapping()
    assert list(restored) == ["a", "b", "c", "d"]
    for name, array in arrays.items():
        assert restored[name].dtype == array.dtype
        assert tuple(restored[name].shape) == tuple(array.shape)
        assert bool((restored[name] == array).all())
    specs = Arrays.from_mapping(arrays).specs
    assert read_specs(write_specs(specs)) == specs


@pytest.mark.parametrize(
    "rows",
    [
        "text",
        None,
        [["w", [2], "float32"]],
        [["w", [-1], "float32", "numpy"]],
        [["w", [True], "float32", "numpy"]],
        [["w", [2**40], "float32", "numpy"]],
        [["w", [2], "object", "numpy"]],
        [["w", [2], "bfloat16", "numpy"]],
        [["w", [2], "float32", "os"]],
        [[3, [2], "float32", "numpy"]],
        [["w", [2], "float32", "numpy"], ["w", [2], "float32", "numpy"]],
    ],
)
def test_malformed_specs_are_rejected(rows: Any) -> None:
    with pytest.raises(RejectedMessage, match="E_LAYOUT"):
        read_specs(rows)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"keep": 0}, "keep: expected"),
        ({"keep": 1.1}, "keep: expected"),
        ({"keep": "0.1"}, "keep: expected"),
        ({"values": "bfloat"}, "values: expected .*Did you mean 'bfloat16'"),
        ({"mask": ()}, "mask: expected"),
    ],
)
def test_invalid_setting_is_named(arguments: Any, field: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        StreamSettings(**arguments)


def test_mask_that_names_no_array_is_an_error() -> None:
    sender = ModelSender(RUN, "model")
    sender.encode(build_arrays(0), 0, StreamSettings(mask=("backbone.*",)), "a")
    sender.accept("a", "a" * 16)
    with pytest.raises(ConfigError, match=r"no array matches \['backbone.\*'\]; the arrays are conv.weight"):
        sender.encode(build_arrays(1), 1, StreamSettings(mask=("backbone.*",)), "a")
