"""Find the units of linear layers whose changes reveal the input of a single training example.

The change of a unit's weights is a sum of the layer's inputs, and the change of its bias the sum of the same factors.
If one example alone moved a unit, or is all that distinguishes two units, up to a factor, the quotient of both changes
is its input.
A hostile server can build a model in which this holds for most examples (Fowl et al. 2022, "Robbing the Fed").
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...core.mask import Mask
from ...core.params import Layout

MAX_EXAMPLES = 2048
"""Training examples that are compared with an update."""
CLOSENESS = 0.5
"""A quotient reveals an example if it is closer to it than this share of the example's distance from the mean."""
AMBIGUITY = 0.5
"""A quotient is ambiguous if its distance from the nearest example exceeds this share of that from the next."""
LINE_CLOSENESS = 0.1
"""The same share for two units combined with any factors; smaller, because a line passes close to more examples."""
_ROUNDING = 1e-14
"""Squared relative difference below which two quotients are equal in float32."""
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
    """Return which units reveal an example, alone or combined with another unit, as bool ``(units,)``.

    Args:
        weight: ``(units, features)`` change of the weights.
        bias: ``(units,)`` change of the biases.
        examples: ``(n, features)`` inputs of the layer.
    """
    # Equal examples count once. A unit whose own quotient reveals one is withheld, so it enters no combination.
    weight, bias, examples = weight.double(), bias.double(), examples.unique(dim=0).double()
    squares, spread = examples.square().sum(1), (examples - examples.mean(0)).square().sum(1)
    # Unit i reveals x if w_i / b_i is close to x: compared as |w_i - b_i x|^2, which needs no division.
    distances = weight.square().sum(1, keepdim=True) - 2 * bias[:, None] * (weight @ examples.T)
    distances += bias[:, None] ** 2 * squares
    is_isolated = _is_revealed(distances, CLOSENESS**2 * bias[:, None] ** 2 * spread)
    remaining = (~is_isolated).nonzero().flatten()
    is_isolated[remaining] = _find_isolated_pairs(weight[remaining], bias[remaining], examples, squares, spread)
    return is_isolated


def _find_isolated_pairs(weight: Tensor, bias: Tensor, examples: Tensor, squares: Tensor, spread: Tensor) -> Tensor:
    """Return which units reveal an example when combined with another unit, as bool ``(units,)``.

    Args:
        weight: ``(units, features)`` change of the weights, in float64 as the others.
        bias: ``(units,)`` change of the biases.
        examples: ``(n, features)`` distinct inputs of the layer.
        squares: ``(n,)`` squared norms of the examples.
        spread: ``(n,)`` their squared distances from the mean.
    """
    units = len(bias)
    gram, products = weight @ weight.T, weight @ examples.T
    # Of example x, unit i leaves the residual r_i = w_i - b_i x.
    residuals = gram.diagonal()[:, None] - 2 * bias[:, None] * products + bias[:, None] ** 2 * squares
    is_isolated = torch.zeros(units, dtype=torch.bool)
    chunk = max(1, _MAX_ELEMENTS // max(units * len(examples), 1))
    for start in range(0, units, chunk):
        rows = slice(start, min(start + chunk, units))
        overlaps = gram[rows, :, None] - bias[:, None] * products[rows, None] - bias[rows, None, None] * products
        overlaps += (bias[rows, None] * bias)[..., None] * squares
        # Compute the squared distance of (w_i - w_j) / (b_i - b_j) from x without the quotients themselves.
        distances = residuals[rows, None] + residuals - 2 * overlaps
        factors = (bias[rows, None] - bias).square()
        # A unit minus itself, or minus one with an equal bias, leaves nothing but rounding.
        is_pair = factors > _ROUNDING * (bias[rows, None].square() + bias.square())
        is_close = _is_revealed(distances, CLOSENESS**2 * factors[..., None] * spread) & is_pair
        # A server that weights its units differently combines them with factors: every quotient lies on the line
        # through w_i / b_i and w_j / b_j, and x is as far from it as the area of r_i and r_j divided by its base.
        areas = residuals[rows, None] * residuals - overlaps.square()
        lengths = gram.diagonal()[rows, None] * bias**2 + bias[rows, None] ** 2 * gram.diagonal()
        bases = lengths - 2 * bias[rows, None] * bias * gram[rows]
        # The quotients of equal units lie on no line: the direction would be rounding.
        is_line = bases > _ROUNDING * lengths
        is_close |= _is_revealed(areas, LINE_CLOSENESS**2 * bases[..., None] * spread) & is_line
        is_isolated[rows] |= is_close.any(1)
        is_isolated |= is_close.any(0)
    return is_isolated


def _is_revealed(distances: Tensor, limits: Tensor) -> Tensor:
    """Return whether a distance is below its limit and clearly the smallest, along the last dimension.

    Strictly below: without a change both are zero, and an example at the mean is revealed by no unit. Where examples
    lie densely, as in a layer of few inputs, a point near two of them points at neither.
    """
    if not distances.shape[-1]:
        return torch.zeros(distances.shape[:-1], dtype=torch.bool)
    nearest = distances.topk(min(2, distances.shape[-1]), largest=False).values
    return (distances < limits).any(-1) & (nearest[..., 0] <= AMBIGUITY**2 * nearest[..., -1])
