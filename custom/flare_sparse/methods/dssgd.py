"""DSSGD (Shokri and Shmatikov 2015, distributed selective SGD): each site uploads its largest changes, one by one."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field
from torch import Tensor

from ..mask import Mask, floor_fraction, top_k
from ..training import Site
from .method import MethodConfig
from .scbf import SCBF, Aggregation


class Config(MethodConfig):
    rate: float = Field(0.3, gt=0, le=1, description="share of the parameters that a site uploads in a round")
    aggregation: Aggregation = Field("sum", description="sum (the paper), mean or count; as in scbf")


class DSSGD(SCBF):
    """As SCBF, but parameters are chosen one by one, by the size of their change; running statistics always travel.

    Sites download everything (download rate 1), so the paper's decay of update counters has no effect and no setting.
    """

    name = "dssgd"
    Config: ClassVar[type[MethodConfig]] = Config
    SiteConfig: ClassVar[type[BaseModel] | None] = None

    def revealed(self, change: Tensor, site: Site, t: int) -> Mask:
        parameters = Mask.from_tensors(site.layout, lambda entry: entry.role != "buffer")
        return top_k(change.abs(), floor_fraction(self.config.rate, parameters.count), within=parameters) | ~parameters

    @property
    def note(self) -> str:
        return ""
