"""Choice between dense and sparse computation of local training."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cached_property, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from ..compute import Compute
from ..core.errors import ConfigError
from ..core.mask import Mask
from .flat import FlatModel
from .trainer import Trainer, Training, Wrapper

if TYPE_CHECKING:
    from ..compute.kernels.chains import Chain
    from ..compute.kernels.network import Block

_LOG = logging.getLogger(__name__)


class SparseComputeTrainer(Wrapper):
    """Computes a training with sparse kernels, where these are faster and the settings let it.

    Args:
        inner: trains.
        model: the network that it trains.
    """

    def __init__(self, inner: Trainer, model: FlatModel):
        super().__init__(inner)
        self._model = model
        self._blocks: tuple[Mask, list[Block]] | None = None

    def train(self, training: Training) -> Tensor:
        config = training.config
        # The kernels compute in float32, and torch.compile cannot trace them.
        if config.precision != "float32" or config.compile or not can_use_kernels(config.compute, self._model.device):
            return self._inner.train(training)
        # numba is an optional dependency, which takes a second to import.
        from ..compute.kernels.network import install_blocks

        blocks = self._find_blocks(training)
        for block in blocks:
            block.is_sparse = False
        trained = self._inner.train(replace(training, within=partial(install_blocks, blocks)))
        names = [block.chain.name for block in blocks if block.is_sparse]
        _LOG.info("sparse kernels computed %d of %d layers: %s", len(names), len(blocks), ", ".join(names))
        return trained

    @cached_property
    def _chains(self) -> list[Chain]:
        """Layers that the kernels can compute; to trace a small network takes as long as to train it for an epoch."""
        from ..compute.kernels.chains import find_chains

        return find_chains(self._model.module)

    def _find_blocks(self, training: Training) -> list[Block]:
        """Return the blocks of the live weights: those that train, and those that are not 0."""
        from ..compute.kernels import network
        from ..compute.kernels.preparation import decide_and_prepare

        trainable, layout = training.trainable, self._model.layout
        # With one mask for both, the live weights are those of the mask in every round: their blocks are kept.
        if training.patch is None or training.patch.mask is not trainable:
            live = torch.logical_or(trainable.bits, training.start != 0)
            return network.build_blocks(self._chains, layout.unflatten(live), decide_and_prepare)
        if self._blocks is None or self._blocks[0] != trainable:
            weights = layout.unflatten(trainable.bits)
            self._blocks = trainable, network.build_blocks(self._chains, weights, decide_and_prepare)
        return self._blocks[1]


def can_use_kernels(compute: Compute, device: torch.device) -> bool:
    """Return whether sparse kernels may be used.

    Raises:
        ConfigError: ``compute`` is none of the three, or ``sparse`` is asked for without numba or on a GPU.
    """
    if compute not in get_args(Compute):
        raise ConfigError(f"compute: {compute!r} is none of {', '.join(get_args(Compute))}")
    obstacle = ""
    if find_spec("numba") is None:
        obstacle = "numba is not installed (pip install 'flare-sparse[fast]')"
    elif device.type != "cpu":
        obstacle = f"the kernels are for CPUs, and this site computes on {device}"
    if compute == "sparse" and obstacle:
        raise ConfigError(f"compute: sparse is not possible: {obstacle}; set it to auto or dense")
    return compute != "dense" and not obstacle
