"""Find the units of linear layers whose changes reveal the input of a single training example.

The change of a unit's weights is a sum of the layer's inputs, and the change of its bias the sum of the same factors.
If one example alone moved a unit, or is all that distinguishes two units, the quotient of both changes is its input.
A hostile server can build a model in which this holds for most examples (Fowl et al. 2022, "Robbing the Fed").
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..mask import Mask
from ..params import Layout

MAX_EXAMPLES = 2048
"""Training examples that are compared with an update."""
CLOSENESS = 0.5
"""A quotient reveals an example if it is closer to it than this share of the example's distance from the mean."""
_MAX_ELEMENTS = 2**24
"""Elements of a temporary tensor, which bounds memory."""


def withhold_isolated_units(
    values: Tensor, mask: Mask, layout: Layout, inputs: Mapping[str, Tensor]
) -> tuple[Tensor, int]:
    """Return the values of a delta with zeros for the units that reveal an example, and the number of these units.

    If there is no such unit, the very object ``values`` is returned.

    Args:
        values: ``(mask.count,)`` the delta.
        mask: entries of the delta.
        layout: layout of the model.
        inputs: inputs ``(n, features)`` of the linear layers on the site's training examples, by the layer's name.
    """
    delta = mask.put(values, torch.zeros(layout.size))
    tensors = layout.unflatten(delta)
    num_withheld = 0
    for layer, examples in inputs.items():
        weight, bias = tensors.get(f"{layer}.weight"), tensors.get(f"{layer}.bias")
        if weight is None or bias is None:
            continue
        units = find_isolated_units(weight, bias, examples)
        # The tensors are views of the vector.
        weight[units], bias[units] = 0.0, 0.0
        num_withheld += int(units.sum())
    return (mask.take(delta), num_withheld) if num_withheld else (values, 0)


def find_isolated_units(weight: Tensor, bias: Tensor, examples: Tensor) -> Tensor:
    """Return which units reveal an example, alone or by their difference to another unit, as bool ``(units,)``.

    Args:
        weight: ``(units, features)`` change of the weights.
        bias: ``(units,)`` change of the biases.
        examples: ``(n, features)`` inputs of the layer.
    """
    units = len(bias)
    # The last row is a unit that no example moved: its difference to a unit is that unit itself.
    weight = torch.cat([weight, torch.zeros(1, weight.shape[1])]).double()
    bias, examples = torch.cat([bias, torch.zeros(1)]).double(), examples.double()
    products, squares = weight @ examples.T, examples.square().sum(1)
    gram, spread = weight @ weight.T, (examples - examples.mean(0)).square().sum(1)
    is_isolated = torch.zeros(units + 1, dtype=torch.bool)
    chunk = max(1, _MAX_ELEMENTS // ((units + 1) * max(len(examples), 1)))
    for start in range(0, units, chunk):
        rows = slice(start, min(start + chunk, units))
        factors = bias[rows, None] - bias
        norms = gram.diagonal()[rows, None] + gram.diagonal() - 2 * gram[rows]
        # Squared distance of (w_i - w_j) / (b_i - b_j) from every example, without the quotients themselves.
        overlaps = products[rows, None] - products[None]
        distances = norms[..., None] - 2 * factors[..., None] * overlaps + factors.square()[..., None] * squares
        # A change of equal biases has no quotient. Strictly below: an example at the mean is revealed by no unit.
        is_close = (distances < CLOSENESS**2 * factors.square()[..., None] * spread).any(-1)
        is_isolated[rows] |= is_close.any(1)
        is_isolated |= is_close.any(0)
    return is_isolated[:units]
