"""The order in which a site's trainer is put together; the only place that knows all of its parts.

The smaller networks of a site's own, which have no entries but the live ones, are put together here, too.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..compute.structure.compact import remove_channels
from ..compute.structure.removal import narrow_network
from ..core.errors import ConfigError
from ..core.mask import Mask
from ..privacy.dp.mechanism import SiteMechanism
from ..privacy.dp.metrics import MetricRelease
from .compute import SparseComputeTrainer
from .local_task import LocalTask
from .personal import PersonalTrainer
from .private import PrivateMetricsTrainer, PrivateTrainer, SilentTrainer
from .site import Site
from .task_trainer import TaskTrainer
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


@dataclass(frozen=True)
class SitePrivacy:
    """What protects the subjects of a site.

    Attributes:
        mechanism: differential privacy of the training; None: the job does not ask for it.
        metric_release: adds noise to metrics; None: they are exact, or stay here.
        sends_metrics: whether metrics are computed at all.
    """

    mechanism: SiteMechanism | None = None
    metric_release: MetricRelease | None = None
    sends_metrics: bool = True


def build_trainer(
    local: LocalTask, *, personal: Mapping[str, Tensor] | None = None, privacy: SitePrivacy | None = None
) -> Trainer:
    """Return the trainer of a task, each wrapper around those before it.

    Args:
        local: the task, the site's examples and the network.
        personal: initial values of the tensors that stay at the site, by name; none: all travel.
        privacy: what protects the site's subjects; None: nothing.
    """
    privacy = privacy or SitePrivacy()
    trainer: Trainer = TaskTrainer(local)
    # The kernels compute whole minibatches, and private training single records.
    if privacy.mechanism is None:
        trainer = SparseComputeTrainer(trainer, local.model)
    else:
        trainer = PrivateTrainer(trainer, local, privacy.mechanism)
    if not privacy.sends_metrics:
        trainer = SilentTrainer(trainer)
    elif privacy.metric_release is not None:
        trainer = PrivateMetricsTrainer(trainer, local, privacy.metric_release)
    if personal:
        trainer = PersonalTrainer(trainer, local.model, personal)

    def build_smaller(network: nn.Module) -> Trainer:
        return build_trainer(local.replace_network(network), privacy=privacy)

    return NarrowedTrainer(trainer, local.model.module, build_smaller)


def build_site(
    local: LocalTask,
    site_settings: Any = None,
    *,
    personal: Mapping[str, Tensor] | None = None,
    privacy: SitePrivacy | None = None,
) -> Site:
    """Return a site that trains on a task; arguments as of :class:`.site.Site` and :func:`build_trainer`."""
    return Site(local.name, build_trainer(local, personal=personal, privacy=privacy), site_settings)
