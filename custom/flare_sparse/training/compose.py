"""The order in which a site's trainer is put together; the only place that knows all of its parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..privacy.dp.mechanism import SiteMechanism
from .compute import SparseComputeTrainer
from .local_task import LocalTask
from .narrowed import NarrowedTrainer
from .personal import PersonalTrainer
from .private import PrivateTrainer, SilentTrainer
from .site import Site
from .task_trainer import TaskTrainer
from .trainer import Trainer


@dataclass(frozen=True)
class SitePrivacy:
    """What protects the subjects of a site.

    Attributes:
        mechanism: differential privacy of the training; None: the job does not ask for it.
        sends_metrics: whether metrics are computed at all.
    """

    mechanism: SiteMechanism | None = None
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
