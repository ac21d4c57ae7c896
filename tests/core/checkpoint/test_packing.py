"""Packing: every value comes back as it was, shared objects are written once, other types are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.core.checkpoint.packing import pack, unpack
from flare_sparse.core.errors import CheckpointError
from flare_sparse.core.mask import Mask

S = TypeVar("S")


@dataclass(frozen=True)
class Inner:
    masks: tuple[Mask, ...]
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Outer(Generic[S]):
    state: S
    names: list[str]
    last: torch.Tensor | None


def pack_and_unpack(value: Any, kind: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    return unpack(json.loads(json.dumps(pack(value, tensors))), kind, tensors)


@given(
    on=st.lists(st.booleans(), min_size=1, max_size=40),
    figures=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, width=64)),
    names=st.lists(st.text(max_size=5)),
    last=st.none() | st.lists(st.floats(allow_nan=False, width=32), max_size=5),
)
def test_unpack_inverts_pack(on: list[bool], figures: dict[str, float], names: list[str], last: Any) -> None:
    mask = Mask(torch.tensor(on))
    vector = None if last is None else torch.tensor(last, dtype=torch.float32)
    outer = pack_and_unpack(Outer(Inner((mask, mask), figures), names, vector), Outer[Inner])
    assert outer.state == Inner((mask, mask), figures)
    assert outer.names == names
    assert outer.last is vector if vector is None else torch.equal(outer.last, vector)


def test_fields_of_abstract_types_come_back() -> None:
    mask = Mask(torch.tensor([True, False]))
    value = {"sites": ({"a": mask, "b": mask}, {})}
    assert pack_and_unpack(value, Mapping[str, Sequence[Mapping[str, Mask]]]) == value
    assert pack_and_unpack("sum", Literal["sum", "count"]) == "sum"


def test_shared_object_is_written_once() -> None:
    mask, tensors = Mask(torch.ones(4, dtype=torch.bool)), {}
    pack(Inner((mask, mask, mask)), tensors)
    assert len(tensors) == 1
    unpacked = pack_and_unpack(Inner((mask, mask)), Inner)
    assert unpacked.masks[0] is unpacked.masks[1]


def test_shared_sparse_tensor_is_one_object_again_and_the_next_checkpoint_is_as_small() -> None:
    mask = Mask(torch.arange(5000) % 10 == 0)
    weights = mask.put(torch.ones(mask.count), torch.zeros(mask.size))
    first: dict[str, torch.Tensor] = {}
    packed = pack([Model(weights, (mask,)) for _ in range(20)], first)
    models = unpack(packed, list[Model], first)
    assert len({id(model.weights) for model in models}) == 1
    second: dict[str, torch.Tensor] = {}
    pack(models, second)
    assert [part.nbytes for part in first.values()] == [part.nbytes for part in second.values()] == [625, 4 * 500]


def test_mask_takes_one_bit_per_entry() -> None:
    tensors: dict[str, torch.Tensor] = {}
    pack(Mask(torch.arange(1001) % 3 == 0), tensors)
    assert [(tensor.dtype, tensor.numel()) for tensor in tensors.values()] == [(torch.uint8, 126)]


@given(
    shape=st.sampled_from([(4096,), (64, 65), (16, 4, 70)]),
    share=st.sampled_from([0.0, 0.01, 0.4, 0.6, 1.0]),
    seed=st.integers(0, 2**16),
)
def test_zeros_of_a_large_tensor_are_left_out_and_every_bit_comes_back(
    shape: tuple[int, ...], share: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    tensor = torch.randn(shape, generator=draw).where(torch.rand(shape, generator=draw) < share, 0.0)
    tensor.view(-1)[:3] = torch.tensor([-0.0, float("nan"), float("-inf")])
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(tensor, tensors)))
    result = unpack(packed, torch.Tensor, tensors)
    assert result.shape == tensor.shape
    assert torch.equal(result.view(torch.int32), tensor.contiguous().view(torch.int32))
    live = int((tensor.view(torch.int32) != 0).sum())
    stored = sum(part.nbytes for part in tensors.values())
    assert stored == (4 * live + (tensor.numel() + 7) // 8 if share < 0.5 else tensor.nbytes)


@dataclass(frozen=True)
class Model:
    weights: torch.Tensor
    masks: tuple[Mask, ...]


@given(
    zeros_inside=st.sampled_from([0, 1, 156, 157, 400]),
    outside=st.booleans(),
    others=st.lists(st.floats(0.0, 1.0), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_positions_of_a_tensor_are_those_of_a_mask_that_covers_it(
    zeros_inside: int, outside: bool, others: list[float], seed: int
) -> None:
    size, draw = 5000, torch.Generator().manual_seed(seed)
    mask = Mask(torch.rand(size, generator=draw) < 0.2)
    weights = mask.put(torch.randn(mask.count, generator=draw), torch.zeros(size))
    weights[mask.indices[:zeros_inside]] = 0.0
    # -0.0 equals 0.0, but is written.
    weights[(~mask).indices[0]] = -0.0 if outside else 0.0
    masks = (*(Mask(torch.rand(size, generator=draw) < share) for share in others), mask)
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(Model(weights, masks), tensors)))
    result = unpack(packed, Model, tensors)
    assert torch.equal(result.weights.view(torch.int32), weights.view(torch.int32))
    assert result.masks == masks
    bits = [part["bits"] for part in packed["masks"]]
    is_shared = packed["weights"]["bits"] in bits
    if not others:
        assert is_shared == (not outside and zeros_inside <= size // 32)
    own_bits = 4 * int((weights.view(torch.int32) != 0).sum()) + size // 8
    stored = tensors[packed["weights"]["values"]].nbytes + (
        0 if is_shared else tensors[packed["weights"]["bits"]].nbytes
    )
    assert stored <= own_bits


@pytest.mark.parametrize("value", [{1, 2}, object(), lambda: 0, b"bytes"])
def test_pack_refuses_other_types(value: Any) -> None:
    if isinstance(value, bytes):
        assert pack_and_unpack(value, list[int]) == list(value)
        return
    with pytest.raises(CheckpointError, match="cannot be kept"):
        pack(value, {})


@pytest.mark.parametrize(
    ("packed", "kind"),
    [
        ("7", int),
        (True, int),
        (1, bool),
        ([1, "2"], list[int]),
        ({"masks": [], "figures": {}, "more": 1}, Inner),
        ({"masks": ["0"], "figures": {}}, Inner),
        ({"masks": [{"entries": 8, "bits": "missing"}], "figures": {}}, Inner),
        ({"masks": [{"entries": 9, "bits": "bits"}], "figures": {}}, Inner),
        ({"masks": [{"entries": -1, "bits": "bits"}], "figures": {}}, Inner),
        ({"shape": [8], "bits": "bits", "values": "missing"}, torch.Tensor),
        ({"shape": [9], "bits": "bits", "values": "bits"}, torch.Tensor),
        ({"shape": [2, 4], "bits": "bits", "values": "two"}, torch.Tensor),
        ("missing", torch.Tensor),
        (None, int),
        ("mean", Literal["sum", "count"]),
        (["0"], set[torch.Tensor]),
        ("0", Any),
    ],
)
def test_unpack_refuses_values_of_undeclared_types(packed: Any, kind: Any) -> None:
    with pytest.raises(CheckpointError):
        unpack(packed, kind, {"bits": torch.ones(1, dtype=torch.uint8), "two": torch.ones(2)})
