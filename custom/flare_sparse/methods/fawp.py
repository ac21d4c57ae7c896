"""FAwP (Shao et al. 2020), section 4.2: federated averaging with SCBFwP's pruning, to show the effect of the pruning.

"Stochastic Channel-Based Federated Learning With Neural Network Pruning for Medical Data Privacy Preservation", JMIR
Form. Res. 4(12):e17265; docs/algorithms.md, section 3.10.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor

from ..core.exchange import Contribution
from ..core.mask import Mask
from ..training import Site
from .aggregation.weighted import weigh_by_examples, weighted_sum
from .support.selective import SelectiveState
from .support.unit_pruning import PruningConfig, PruningMethod


@final
class FAwP(PruningMethod[PruningConfig]):
    """Every site returns all entries of the remaining units; the server averages, weighted by examples."""

    name = "fawp"
    Config = PruningConfig

    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        return Mask.full(delta.numel())

    def accepts(self, live: Mask, site: str, mask: Mask) -> bool:
        return mask == live

    def aggregate(self, state: SelectiveState, contributions: Sequence[Contribution]) -> Tensor:
        return weighted_sum(contributions, weigh_by_examples)
