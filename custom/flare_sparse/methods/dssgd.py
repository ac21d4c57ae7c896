"""DSSGD (Shokri and Shmatikov 2015): distributed selective SGD; a site uploads its largest changes.

"Privacy-Preserving Deep Learning", CCS 2015; docs/algorithms.md, section 3.9. The paper's update counters, which decide
what a site downloads first, are replaced by the size of the change that it lacks.
"""

from collections.abc import Sequence
from typing import final

from pydantic import Field
from torch import Tensor

from ..core.exchange import Contribution
from ..core.mask import Mask, floor_fraction, top_k
from ..core.needs import Needs
from ..training import Site
from .method import MethodConfig
from .support.selective import Aggregation, SelectiveMethod, SelectiveState, aggregate_revealed, list_selective_needs


class DSSGDConfig(MethodConfig):
    rate: float = Field(0.3, gt=0, le=1, description="share of the parameters that a site uploads in a round")
    download_rate: float = Field(1.0, gt=0, le=1, description="theta_d: share that a site downloads; as in scbf")
    aggregation: Aggregation = Field("sum", description="sum (the paper), mean or count; as in scbf")

    def needs(self) -> Needs:
        return list_selective_needs(self.aggregation)


@final
class DSSGD(SelectiveMethod[DSSGDConfig]):
    """Sites return the single parameters that changed most, and all running statistics; the server adds the deltas."""

    name = "dssgd"
    Config = DSSGDConfig
    trains_all_entries = True

    @property
    def download_rate(self) -> float:
        return self.config.download_rate

    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        parameters = Mask.from_tensors(site.layout, lambda tensor: tensor.role != "buffer")
        return top_k(delta.abs(), floor_fraction(self.config.rate, parameters.count), within=parameters) | ~parameters

    def aggregate(self, state: SelectiveState, contributions: Sequence[Contribution]) -> Tensor:
        return aggregate_revealed(state, contributions, self.config.aggregation, self.parameters)
