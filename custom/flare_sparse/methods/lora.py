"""What the LoRA methods share: the slots of the layout, ranks by site, and the local training of their papers."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field

from ..errors import RejectedMessage
from ..exchange import Request
from ..mask import Mask
from ..params import Layout
from ..scores.ranks import Slots
from ..training import Site, TrainingConfig
from .method import Method, MethodConfig

S = TypeVar("S")
Rank = Annotated[int, Field(ge=1, le=4096)]


class LoRAConfig(MethodConfig):
    """Local training as in LoRA-A2's section 5.1; batch size and weight decay are not given there."""

    training: TrainingConfig = Field(
        default_factory=lambda: TrainingConfig(epochs=5, optimizer="adamw", lr=5e-4, weight_decay=0.01, batch_size=32),
        description="how a site trains in a round",
    )


class RankedConfig(LoRAConfig):
    """Sites that may afford different ranks."""

    rank: Rank = Field(8, description="r_k: rank budget of a site; more than the adapters have counts as all")
    ranks: dict[str, Rank] = Field(default_factory=dict, description="r_k of single sites: {site-1: 2, site-2: 16}")

    def rank_of(self, site: str) -> int:
        """r_k."""
        return self.ranks.get(site, self.rank)


class LoRAMethod(Method[S]):
    """A method that exchanges adapters.

    Raises:
        ConfigError: the network has none.
    """

    def __init__(self, config: Any, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self.slots = Slots(layout)

    def held(self, rank: int) -> Mask:
        """What a site of a rank holds: the first slots of every module, and the rest."""
        return self.slots.first(rank) | self.slots.rest

    def affordable(self, request: Request, site: Site) -> Mask:
        """The entries that a question lets train, within the rank that the site's own copy of the job gives it.

        Raises:
            RejectedMessage: the question asks for more; the site does not train.
        """
        budget = self.held(self.config.rank_of(site.name))
        if not request.trainable <= budget:
            raise RejectedMessage("E_MASK", "trainable", budget, request.trainable, "server")
        return request.trainable
