"""Smaller networks of a site's own, which have no entries but the live ones."""

from collections.abc import Callable

from torch import nn

from ..compute.structure.removal import narrow_network
from ..core.mask import Mask
from .trainer import Trainer, Wrapper


class NarrowedTrainer(Wrapper):
    """Returns trainers of smaller networks, on the same examples.

    Building a network takes longer than a small round, and its structure rarely changes: the latest one is kept.

    Args:
        inner: trains the whole network.
        network: the whole network.
        build: returns a trainer of another network.
    """

    def __init__(self, inner: Trainer, network: nn.Module, build: Callable[[nn.Module], Trainer]):
        super().__init__(inner)
        self._network, self._build = network, build
        self._latest: tuple[Mask, Trainer] | None = None

    def narrow(self, live: Mask) -> Trainer:
        if self._latest is None or self._latest[0] != live:
            self._latest = live, self._build(narrow_network(self._network, live))
        return self._latest[1]
