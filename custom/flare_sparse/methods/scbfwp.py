"""SCBFwP (Shao et al. 2020), section 3.3: SCBF whose server removes the units that are idle most often (APoZ).

"Stochastic Channel-Based Federated Learning With Neural Network Pruning for Medical Data Privacy Preservation", JMIR
Form. Res. 4(12):e17265; docs/algorithms.md, section 3.8.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import final

from torch import Tensor

from ..core.exchange import Contribution
from ..core.mask import Mask
from ..training import Site
from .support.channels import ChannelConfig, ChannelSelector, ChannelSiteConfig
from .support.selective import SelectiveState, aggregate_revealed
from .support.unit_pruning import PruningConfig, PruningMethod
from .traffic.base import Traffic
from .traffic.selective import ChannelPruningTraffic


class Config(ChannelConfig, PruningConfig):
    """Settings of SCBF's rounds and of the pruning."""


@final
class SCBFwP(PruningMethod[Config]):
    """As SCBF; after rounds of training, sites count how often each unit was zero and the server removes units."""

    name = "scbfwp"
    Config = Config
    SiteConfig = ChannelSiteConfig

    @cached_property
    def selector(self) -> ChannelSelector:
        return ChannelSelector(self.config, self.seed)

    @cached_property
    def traffic(self) -> Traffic:
        return ChannelPruningTraffic(self)

    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        return self.selector.reveal(delta, site, t)

    def aggregate(self, state: SelectiveState, contributions: Sequence[Contribution]) -> Tensor:
        return aggregate_revealed(state, contributions, self.config.aggregation, self.parameters)

    def describe(self, state: SelectiveState | None = None) -> str:
        return f"{self.selector.describe(self.layout)}; {super().describe()}" if state is None else ""
