"""SCBF (Shao et al. 2020), Algorithm 2: each site reveals only the channels that moved most; the server adds them up.

"Stochastic Channel-Based Federated Learning With Neural Network Pruning for Medical Data Privacy Preservation", JMIR
Form. Res. 4(12):e17265; docs/algorithms.md, section 3. A site reveals where its data moved the model most. The upload
has no noise and gives no formal privacy guarantee (section 3.12, deviation 12).
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
from .support.selective import SelectiveMethod, SelectiveState, aggregate_revealed
from .traffic.base import Traffic
from .traffic.selective import ChannelTraffic


@final
class SCBF(SelectiveMethod[ChannelConfig]):
    """Sites return the entries on their most changed channel paths; the server adds the deltas."""

    name = "scbf"
    Config = ChannelConfig
    SiteConfig = ChannelSiteConfig

    @cached_property
    def selector(self) -> ChannelSelector:
        return ChannelSelector(self.config, self.seed)

    @cached_property
    def traffic(self) -> Traffic:
        return ChannelTraffic(self)

    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        return self.selector.reveal(delta, site, t)

    def aggregate(self, state: SelectiveState, contributions: Sequence[Contribution]) -> Tensor:
        return aggregate_revealed(state, contributions, self.config.aggregation, self.parameters)

    def describe(self, state: SelectiveState | None = None) -> str:
        return self.selector.describe(self.layout) if state is None else ""
