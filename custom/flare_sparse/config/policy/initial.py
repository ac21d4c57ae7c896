"""Compare the first model that a server sends with the one that the site's own copy of the job defines.

Scores and updates of the first round are then those of a model that no server has chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...compute.structure.scaling import build_statistics_mask
from ...core.mask import Mask
from ...core.params import Layout
from ...wire.plan import ValueType

TOLERANCE = 2.0**-12
"""Difference between machines that draw the same model, relative to the largest value of a tensor."""
_ROUNDING: dict[ValueType, float] = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "bfloat16_zstd": 2.0**-7,
    "int8": 2.0**-6,
    "int4": 2.0**-2,
    "int2": 1.0,
}
"""Rounding of a model on the wire, relative to the largest value of a tensor; other formats do not round visibly."""


def find_changed_tensor(received: Tensor, initial: Tensor, mask: Mask, layout: Layout, values: ValueType) -> str | None:
    """Return the name of a tensor that differs from the initial model; None if there is none.

    Args:
        received: ``(P,)`` the model that the server sent.
        initial: ``(P,)`` the model that the job's settings and seed define.
        mask: live entries of the received model; the others are not compared.
        layout: layout of the model.
        values: number format on the wire, which rounds.
    """
    compared = mask - build_statistics_mask(layout)
    differences = layout.unflatten(torch.where(compared.bits, (received - initial).abs(), 0.0))
    tolerance = max(TOLERANCE, _ROUNDING.get(values, 0.0))
    for name, tensor in layout.unflatten(initial).items():
        limit = tolerance * max(float(tensor.abs().max()), TOLERANCE) if tensor.numel() else 0.0
        if tensor.numel() and not float(differences[name].max()) <= limit:
            return name
    return None
