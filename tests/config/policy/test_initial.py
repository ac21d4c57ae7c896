"""A site recognises the initial model of its job."""

from __future__ import annotations

import pytest
import torch

from flare_sparse.config.policy.initial import find_changed_tensor
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.inputs.scaling import InputScaler
from flare_sparse.wire.formats import ValueType


@pytest.mark.parametrize(
    ("values", "error", "is_changed"),
    [
        ("float32", 1e-5, False),
        ("float32", 1e-2, True),
        ("bfloat16", 1e-3, False),
        ("bfloat16", 1e-2, True),
        ("int8", 1e-2, False),
        ("int8", 5e-2, True),
    ],
)
def test_difference_beyond_rounding_is_found(values: ValueType, error: float, *, is_changed: bool) -> None:
    layout = Layout.from_module(torch.nn.Linear(4, 2))
    initial = torch.linspace(-1, 1, layout.size)
    received = initial.clone()
    received[-1] += error
    name = find_changed_tensor(received, initial, Mask.full(layout.size), layout, values)
    assert name == (layout.tensors[-1].name if is_changed else None)
    # An entry that is off is not compared.
    live = Mask(torch.arange(layout.size) < layout.size - 1)
    assert find_changed_tensor(received, initial, live, layout, values) is None


def test_statistics_of_inputs_are_not_compared() -> None:
    layout = Layout.from_module(torch.nn.Sequential(InputScaler([True, False]), torch.nn.Linear(2, 1)))
    initial = torch.zeros(layout.size)
    received = torch.where(Mask.from_tensors(layout, lambda spec: spec.role == "buffer").bits, 3.0, initial)
    assert find_changed_tensor(received, initial, Mask.full(layout.size), layout, "float32") is None
