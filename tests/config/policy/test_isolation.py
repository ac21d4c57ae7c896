"""Which units of a linear layer are withheld because their changes reveal a training example."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flare_sparse.config.policy.isolation import find_isolated_units, withhold_isolated_units
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout, TensorSpec

EXAMPLES = (torch.rand(60, 40, generator=torch.Generator().manual_seed(1)) < 0.3).float()
ALL = torch.ones(60)


def sum_examples(*factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the changes of the weights and biases of units to which each example contributes with a factor."""
    matrix = torch.stack(factors)
    return matrix @ EXAMPLES, matrix.sum(1)


def all_but(*numbers: int) -> Tensor:
    factors = ALL.clone()
    factors[list(numbers)] = 0.0
    return factors


@pytest.mark.parametrize(
    ("factors", "isolated"),
    [
        pytest.param([ALL, ALL - all_but(3)], [False, True], id="one example"),
        pytest.param([ALL, all_but(3)], [True, True], id="one example more than another unit"),
        pytest.param([2.5 * ALL, all_but(3)], [True, True], id="one example more, in another scale"),
        pytest.param([-ALL, all_but(3), all_but(3, 4, 5, 6)], [True, True, False], id="opposite sign"),
        pytest.param([ALL, all_but(3, 4, 5, 6)], [False, False], id="four examples more"),
        pytest.param([ALL, ALL, 3 * ALL], [False, False, False], id="equal units"),
        pytest.param([0 * ALL, ALL], [False, False], id="a unit that did not change"),
    ],
)
def test_units_that_differ_in_one_example_are_isolated(factors: list[Tensor], isolated: list[bool]) -> None:
    assert find_isolated_units(*sum_examples(*factors), EXAMPLES).tolist() == isolated


@pytest.mark.parametrize("copies", [1, 3])
def test_rounding_isolates_no_unit_from_itself_and_none_from_its_equals(copies: int) -> None:
    # Sums of all examples, as float32 rounds them: 200 layers of one unit, and of three equal ones.
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        weight, bias = sum_examples(torch.randn(60, generator=generator))
        assert not find_isolated_units(weight.expand(copies, -1), bias.expand(copies), EXAMPLES + 0.1).any()


def test_dense_examples_are_not_revealed_by_a_point_between_them() -> None:
    examples = torch.linspace(-1, 1, 101)[:, None] * torch.tensor([[1.0, 2.0]])
    point = torch.tensor([[0.51, 1.02]])
    assert find_isolated_units(point, torch.ones(1), examples).tolist() == [False]
    assert find_isolated_units(examples[:1], torch.ones(1), examples).tolist() == [True]


def test_isolated_units_become_zero_and_others_keep_their_bits() -> None:
    layout = Layout((TensorSpec("0.weight", (2, 40), "weight"), TensorSpec("0.bias", (2,), "bias")))
    weight, bias = sum_examples(ALL, ALL - all_but(3))
    values = torch.cat([weight.flatten(), bias])
    kept, count = withhold_isolated_units(values, Mask.full(82), layout, {"0": EXAMPLES})
    assert count == 1
    tensors = layout.unflatten(kept)
    assert torch.equal(tensors["0.weight"][0], weight[0])
    assert tensors["0.bias"].tolist() == [60.0, 0.0]
    assert not tensors["0.weight"][1].any()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_layer_of_which_one_tensor_alone_is_trained_is_sent_as_it_is(name: str) -> None:
    layout = Layout((TensorSpec(f"0.{name}", (2, 40) if name == "weight" else (2,), name),))
    values = torch.ones(layout.size)
    kept, count = withhold_isolated_units(values, Mask.full(layout.size), layout, {"0": EXAMPLES})
    assert kept is values
    assert count == 0
