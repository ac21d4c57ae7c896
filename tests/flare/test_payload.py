"""Converters between messages, DXOs and updates lose nothing, and changes of a site's filter are sent."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.task_utils import contains_lazy_download_ref

from flare_sparse.core.errors import RejectedMessage
from flare_sparse.core.exchange import Patch, Update
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.flare.payload import (
    NamedArrays,
    dxo_to_update,
    message_to_shareable,
    shareable_to_message,
    update_to_dxo,
)

LAYOUT = Layout((TensorSpec("a.weight", (2, 3), "weight"), TensorSpec("a.bias", (2,), "bias")))
MASK = Mask(torch.tensor([1, 0, 1, 0, 0, 1, 1, 1], dtype=torch.bool))


def update(content: str = "weights") -> Update:
    return Update(Patch.from_vector(torch.arange(8.0) + 1, MASK), content, 5, {"mae": 2.0})  # type: ignore[arg-type]


def test_message_survives_a_shareable() -> None:
    message = np.arange(10, dtype=np.uint8)
    back, meta = shareable_to_message(message_to_shareable(message, {"examples": 3}), "site-1")
    assert back is message
    assert meta == {"examples": 3}


@pytest.mark.parametrize(
    ("shareable", "field"),
    [
        (Shareable(), "content"),
        (DXO(DataKind.WEIGHTS, data={"message": np.zeros(3, np.uint8)}).to_shareable(), "content"),
        (DXO(DataKind.APP_DEFINED, data={"message": b"abc"}).to_shareable(), "content"),
        (DXO(DataKind.APP_DEFINED, data={"message": np.zeros((2, 2), np.uint8)}).to_shareable(), "message"),
        (DXO(DataKind.APP_DEFINED, data={"message": np.zeros(3, np.float64)}).to_shareable(), "message"),
    ],
)
def test_anything_but_a_message_is_rejected_with_site_and_field(shareable: Shareable, field: str) -> None:
    with pytest.raises(RejectedMessage) as caught:
        shareable_to_message(shareable, "site-1")
    assert (caught.value.site, caught.value.field) == ("site-1", field)


@pytest.mark.parametrize(
    ("content", "kind"), [("weights", "WEIGHTS"), ("delta", "WEIGHT_DIFF"), ("scores", "WEIGHT_DIFF")]
)
def test_update_becomes_an_ordinary_dxo_of_named_arrays(content: str, kind: str) -> None:
    dxo = update_to_dxo(update(content), LAYOUT)
    assert dxo.data_kind == kind
    assert np.array_equal(dxo.data["a.weight"], [[1, 0, 3], [0, 0, 6]])
    assert np.array_equal(dxo.data["a.bias"], [7, 8])
    assert dxo.meta == {"content": content, "examples": 5}


def test_arrays_are_built_only_if_a_filter_reads_them() -> None:
    sent = update()
    dxo = update_to_dxo(sent, LAYOUT)
    assert isinstance(dxo.data, NamedArrays)
    # FLARE searches all that a result holds before its first filter.
    assert not contains_lazy_download_ref(dxo.to_shareable())
    assert dxo_to_update(from_shareable(dxo.to_shareable()), sent, LAYOUT) is sent
    assert dxo.data.is_unread
    assert list(dxo.data) == ["a.weight", "a.bias"]
    assert not dxo.data.is_unread


@pytest.mark.parametrize(
    "read",
    [
        dict,
        lambda data: {**data},
        copy.deepcopy,
        copy.copy,
        lambda data: pickle.loads(pickle.dumps(data)),
        lambda data: data.copy(),
        lambda data: data | {},
        lambda data: {} | data,
        lambda data: dict(data.items()),
        lambda data: dict(zip(data.keys(), data.values(), strict=True)),
        lambda data: {name: data.pop(name) for name in ("a.weight", "a.bias")},
        lambda data: {name: data.get(name) for name in reversed(data)},
    ],
)
def test_every_way_to_read_the_arrays_builds_them(read: Any) -> None:
    data = read(update_to_dxo(update(), LAYOUT).data)
    assert type(data) is dict or isinstance(data, NamedArrays)
    assert len(data) == 2
    assert np.array_equal(data["a.weight"], [[1, 0, 3], [0, 0, 6]])
    assert np.array_equal(data["a.bias"], [7, 8])


def test_dictionary_that_was_filled_past_its_methods_is_rejected() -> None:
    sent = update()
    dxo = update_to_dxo(sent, LAYOUT)
    dict.__setitem__(dxo.data, "a.bias", np.zeros(3))
    with pytest.raises(RejectedMessage):
        dxo_to_update(dxo, sent, LAYOUT)


def test_untouched_values_come_back_bit_for_bit() -> None:
    sent = update()
    dxo = update_to_dxo(sent, LAYOUT)
    back = dxo_to_update(dxo, sent, LAYOUT)
    assert torch.equal(back.patch.values, sent.patch.values)


def test_arrays_changed_in_place_or_replaced_by_a_site_filter_are_sent() -> None:
    sent = update()
    dxo = update_to_dxo(sent, LAYOUT)
    dxo.data["a.weight"] *= 2
    dxo.data["a.bias"] = np.array([-1.0, -2.0])
    back = dxo_to_update(from_shareable(dxo.to_shareable()), sent, LAYOUT)
    assert back.patch.values.tolist() == [2.0, 6.0, 12.0, -1.0, -2.0]


def test_transposed_view_of_the_same_memory_counts_as_changed() -> None:
    square = Layout((TensorSpec("w", (2, 2), "weight"),))
    sent = Update(Patch.from_vector(torch.arange(4.0), Mask.full(4)), "weights", 1)
    dxo = update_to_dxo(sent, square)
    dxo.data["w"] = dxo.data["w"].T.copy().T.T
    assert dxo_to_update(dxo, sent, square).patch.values.tolist() == [0.0, 2.0, 1.0, 3.0]


@pytest.mark.parametrize("name", ["removed", "reshaped", "kind"])
def test_update_broken_by_a_filter_is_rejected(name: str) -> None:
    sent = update()
    dxo = update_to_dxo(sent, LAYOUT)
    if name == "removed":
        del dxo.data["a.bias"]
    elif name == "reshaped":
        dxo.data["a.bias"] = np.zeros(3)
    else:
        dxo.data_kind = DataKind.APP_DEFINED
    with pytest.raises(RejectedMessage):
        dxo_to_update(dxo, sent, LAYOUT)
