"""What the LoRA methods share: the slots of the layout, ranks by site, and the local training of their papers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ...capabilities import Capabilities, local_capabilities
from ...errors import RejectedMessage
from ...exchange import Request
from ...mask import Mask
from ...params import Layout
from ...scores.ranks import Slots
from ...training import Site, TrainingConfig
from ..method import Method, MethodConfig

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
        return self.slots.select_first(rank) | self.slots.rest


class RankSiteConfig(BaseModel):
    """What a site may set for itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: Rank | None = Field(None, description="rank budget of this site, where the job asks for more")


class RankedMethod(LoRAMethod[S]):
    """A method whose sites may afford different ranks: the job's, or their own where it is smaller."""

    SiteConfig = RankSiteConfig

    def get_capabilities(self, site: Site) -> Capabilities:
        return local_capabilities(rank=None if site.site_settings is None else site.site_settings.rank)

    def configured_for(self, able: Mapping[str, Capabilities]) -> RankedMethod[S]:
        ranks = {site: min(self.config.rank_of(site), said.rank) for site, said in able.items() if said.rank}
        config = self.config.model_copy(update={"ranks": {**self.config.ranks, **ranks}})
        return type(self)(config, self.layout, self.seed)

    def get_site_rank(self, site: Site) -> int:
        """r_k as the site itself knows it; the same that the server plans with."""
        rank: int = self.config.rank_of(site.name)
        chosen = None if site.site_settings is None else site.site_settings.rank
        return min(rank, chosen or rank)

    def check_affordable(self, request: Request, site: Site) -> Mask:
        """The entries that a question lets train, within the rank that the site itself knows it has.

        Raises:
            RejectedMessage: the question asks for more; the site does not train.
        """
        budget = self.held(self.get_site_rank(site))
        if not request.trainable <= budget:
            raise RejectedMessage("E_MASK", "trainable", budget, request.trainable, "server")
        return request.trainable
