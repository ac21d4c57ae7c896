"""SCBFwP (Shao et al. 2020), section 3.3: SCBF whose server removes the units that are idle most often (APoZ).

"Stochastic Channel-Based Federated Learning With Neural Network Pruning for Medical Data Privacy Preservation", JMIR
Form. Res. 4(12):e17265; docs/algorithms.md, section 3.8.
"""

from typing import final

from .scbf import ChannelConfig, ChannelMethod
from .support.selective import SelectiveState
from .support.unit_pruning import PruningConfig, PruningMethod


class SCBFwPConfig(ChannelConfig, PruningConfig):
    """Settings of SCBF's rounds and of the pruning."""


@final
class SCBFwP(ChannelMethod[SCBFwPConfig], PruningMethod[SCBFwPConfig]):
    """As SCBF; after rounds of training, sites count how often each unit was zero and the server removes units."""

    name = "scbfwp"
    Config = SCBFwPConfig

    def describe(self, state: SelectiveState | None = None) -> str:
        if state is not None:
            return ""
        return f"{self.selector.describe(self.layout)}; {PruningMethod.describe(self)}"
