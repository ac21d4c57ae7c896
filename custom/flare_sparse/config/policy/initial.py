"""Compare the first model that a server sends with the one that the site's own copy of the job defines.

Scores and updates of the first round are then those of a model that no server has chosen.
"""

import torch
from torch import Tensor

from ...core.mask import Mask
from ...core.params import Layout
from ...inputs.scaling import build_statistics_mask
from ...wire.formats import FORMATS, ValueType

TOLERANCE = 2.0**-12
"""Difference between machines that draw the same model, relative to the largest value of a tensor."""


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
    tolerance = max(TOLERANCE, FORMATS[values].rounding)
    for name, tensor in layout.unflatten(initial).items():
        limit = tolerance * max(float(tensor.abs().max()), TOLERANCE) if tensor.numel() else 0.0
        if tensor.numel() and not float(differences[name].max()) <= limit:
            return name
    return None
