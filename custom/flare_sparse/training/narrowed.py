"""Smaller networks of a site's own, which have no entries but the live ones."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..compute.structure.compact import remove_channels
from ..compute.structure.removal import narrow_network
from ..core.errors import ConfigError
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
        # Cache: (key, trainer, mask of its entries); the key is the live mask or the closed channels.
        self._latest: tuple[Any, Trainer, Mask] | None = None

    def narrow(self, live: Mask) -> Trainer:
        if self._latest is None or self._latest[0] != live:
            self._latest = live, self._build(narrow_network(self._network, live)), live
        return self._latest[1]

    def remove_channels(self, closed: Mapping[str, Tensor]) -> tuple[Trainer, Mask]:
        unchanged = self, Mask.full(self.layout.size)
        if not isinstance(self._network, nn.Sequential) or not any(
            bool(channels.any()) for channels in closed.values()
        ):
            return unchanged
        key = tuple((layer, *channels.tolist()) for layer, channels in sorted(closed.items()))
        if self._latest is None or self._latest[0] != key:
            try:
                smaller, live = remove_channels(self._network, closed)
            # All channels of a layer are closed, or its reader is not supported. The full network computes the same
            # function, only more slowly.
            except ConfigError:
                return unchanged
            self._latest = key, self._build(smaller), live
        return self._latest[1:]
