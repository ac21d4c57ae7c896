"""FAwP: federated averaging with SCBFwP's pruning (Shao et al. 2020, section 4.2); what the pruning buys by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import BaseModel
from torch import Tensor

from ..aggregation.weighted import weigh_by_examples, weighted_sum
from ..exchange import Contribution
from ..mask import Mask
from ..training import Site
from .method import MethodConfig
from .scbf import State
from .scbfwp import Pruning, SCBFwP


class FAwP(SCBFwP):
    """Every site uploads all entries of the units that are left; the server averages by examples."""

    name = "fawp"
    Config: ClassVar[type[MethodConfig]] = Pruning
    SiteConfig: ClassVar[type[BaseModel] | None] = None

    def revealed(self, change: Tensor, site: Site, t: int) -> Mask:
        return Mask.full(change.numel())

    def _allowed(self, live: Mask, site: str, on: Mask) -> bool:
        return on == live

    def combined(self, state: State, updates: Sequence[Contribution]) -> Tensor:
        return weighted_sum(updates, weigh_by_examples)

    @property
    def note(self) -> str:
        return self._removable_note
