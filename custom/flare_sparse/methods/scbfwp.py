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
from .traffic import MessageFacts


class Config(ChannelConfig, PruningConfig):
    """Settings of SCBF's rounds and of the pruning."""


@final
class SCBFwP(PruningMethod[Config]):
    """As SCBF; after rounds of training, sites count how often each unit was zero and the server removes units."""

    name = "scbfwp"
    Config = Config
    SiteConfig = ChannelSiteConfig

    @cached_property
    def _selector(self) -> ChannelSelector:
        return ChannelSelector(self.config, self.seed)

    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        return self._selector.reveal(delta, site, t)

    def bound_upload(self, message: MessageFacts, live: tuple[int, int]) -> tuple[int, int]:
        return self._selector.bound_upload(message.site_settings, self.layout, live)

    def aggregate(self, state: SelectiveState, contributions: Sequence[Contribution]) -> Tensor:
        return aggregate_revealed(state, contributions, self.config.aggregation, self.parameters)

    @property
    def note(self) -> str:
        return f"{self._selector.describe(self.layout)}; {super().note}"
