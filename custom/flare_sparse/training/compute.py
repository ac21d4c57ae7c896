"""Choice between dense and sparse computation of local training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.mask import Mask
from .flat import FlatModel

Compute = Literal["auto", "dense", "sparse"]

log = logging.getLogger(__name__)


@contextmanager
def use_compute(
    compute: Compute,
    model: FlatModel,
    start: Tensor,
    trainable: Mask,
    support: Mask | None = None,
    layers: dict[str, str] | None = None,
) -> Iterator[None]:
    """Compute the network with sparse kernels, where these are faster, within the context.

    Args:
        compute: ``auto``: sparse on a CPU with numba installed; ``dense``; ``sparse``: as auto, or an error.
        model: the site's network.
        start: ``(P,)`` weights at the start of training.
        trainable: entries that may change.
        support: entries of ``start`` that may differ from 0; None: unknown.
        layers: receives, at the end, ``sparse`` or ``dense`` for each layer that the kernels support, by its name:
            whether they computed it for any minibatch.

    Raises:
        ConfigError: ``sparse`` is asked for without numba or on a GPU.
    """
    if not can_use_kernels(compute, model.device):
        yield
        return
    # numba is an optional dependency, which takes a second to import.
    from ..compute.kernels.network import build_blocks, install_blocks
    from ..compute.kernels.preparation import prepare_loops

    if not trainable.is_full:
        prepare_loops()
    # Live are the weights that train, and those that are not 0. With one mask for both, they are those of the mask in
    # every round.
    blocks = model.blocks.get(trainable) if support is trainable else None
    if blocks is None:
        live = trainable.bits if support is trainable else torch.logical_or(trainable.bits, start != 0)
        blocks = build_blocks(model.module, _view_weights(model, live))
    if support is trainable:
        model.blocks = {trainable: blocks}
    for block in blocks:
        block.is_sparse = False
    with install_blocks(blocks):
        yield
        names = [block.chain.name for block in blocks if block.is_sparse]
        if layers is not None:
            layers.update((block.chain.name, "sparse" if block.is_sparse else "dense") for block in blocks)
        log.info("sparse kernels computed %d of %d layers: %s", len(names), len(blocks), ", ".join(names))


def can_use_kernels(compute: Compute, device: torch.device) -> bool:
    """Return whether sparse kernels may be used.

    Raises:
        ConfigError: ``compute`` is none of the three, or ``sparse`` is asked for without numba or on a GPU.
    """
    if compute not in get_args(Compute):
        raise ConfigError(f"compute: {compute!r} is none of {', '.join(get_args(Compute))}")
    obstacle = explain_missing_kernels(device)
    if compute == "sparse" and obstacle:
        raise ConfigError(f"compute: sparse is not possible: {obstacle}; set it to auto or dense")
    return compute != "dense" and not obstacle


def explain_missing_kernels(device: torch.device) -> str:
    """Return why the sparse kernels cannot compute on a device of this machine; empty if they can."""
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'flare-sparse[fast]')"
    if device.type != "cpu":
        return f"the kernels are for CPUs, and this site computes on {device}"
    return ""


def _view_weights(model: FlatModel, live: Tensor) -> dict[str, Tensor]:
    """Return views of the bits ``(P,)`` of live entries by name of the weight: those that may differ from 0."""
    layout = model.layout
    return {
        spec.name: live[offset : offset + spec.size].view(spec.shape)
        for spec, offset in zip(layout.tensors, layout.offsets, strict=False)
        if spec.role != "buffer" and len(spec.shape) > 1
    }
