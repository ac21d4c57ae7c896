"""LoRA methods: local training, ranks by site, and the slots of the layout."""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeVar

from pydantic import Field

from ...core.errors import RejectedMessage
from ...core.exchange import Assignment, Patch, Request, UpdateSpec
from ...core.mask import Mask
from ...core.needs import Need, Needs
from ...core.params import Layout
from ...training import Site, TrainingConfig
from ...wire.capabilities import Capabilities
from ..method import Method, MethodConfig, ModelState, SiteSettings, StateT
from ..scores.ranks import Slots

Rank = Annotated[int, Field(ge=1, le=4096)]


class LoRAConfig(MethodConfig):
    """Local training as in Koo et al. 2025, section 5.1, which gives neither batch size nor weight decay."""

    training: TrainingConfig = Field(
        default_factory=lambda: TrainingConfig(epochs=5, optimizer="adamw", lr=5e-4, weight_decay=0.01, batch_size=32)
    )
    """how a site trains in a round"""

    def needs(self) -> Needs:
        return frozenset({Need.MORE_READS.because()})


class RankedConfig(LoRAConfig):
    """Settings of methods whose sites may have different ranks."""

    rank: Rank = 8
    """r_k: rank budget of a site; a number above the adapters' rank means all ranks"""
    ranks: dict[str, Rank] = Field(default_factory=dict)
    """r_k of single sites: {site-1: 2, site-2: 16}"""

    def needs(self) -> Needs:
        reason = "each site has ranks of its own, so the sites do not send the same entries"
        return super().needs() | {Need.OWN_ENTRIES.because(reason)}

    def get_rank(self, site: str) -> int:
        """Return r_k."""
        return self.ranks.get(site, self.rank)


LoRAConfigT = TypeVar("LoRAConfigT", bound=LoRAConfig)
RankedConfigT = TypeVar("RankedConfigT", bound=RankedConfig)


class LoRAMethod(Method[LoRAConfigT, StateT]):
    """A method that exchanges adapters.

    Raises:
        ConfigError: the network has none.
    """

    def __init__(self, config: LoRAConfigT, layout: Layout, seed: int = 0):
        super().__init__(config, layout, seed)
        self.slots = Slots(layout)


class RankSiteConfig(SiteSettings):
    """Settings that a site may choose for itself."""

    rank: Rank | None = None
    """rank budget of this site, where the job asks for more"""

    def get_limits(self) -> dict[str, Any]:
        return {} if self.rank is None else {"rank": self.rank}


class RankedMethod(LoRAMethod[RankedConfigT, StateT]):
    """A method whose sites may have different ranks: the job's, or their own where it is smaller."""

    SiteConfig = RankSiteConfig

    @property
    def named_sites(self) -> tuple[str, ...]:
        return tuple(self.config.ranks)

    def configure_for(self, capabilities: Mapping[str, Capabilities]) -> Self:
        ranks = {
            site: min(self.config.get_rank(site), limits.rank) for site, limits in capabilities.items() if limits.rank
        }
        config = self.config.model_copy(update={"ranks": {**self.config.ranks, **ranks}})
        return type(self)(config, self.layout, self.seed)

    def assign_ranks(self, kind: str, state: ModelState, ranks: Mapping[str, int]) -> dict[str, Assignment]:
        """Return the first slots of the model for each site, given its rank; one object for each rank."""
        assignments = {}
        for rank in set(ranks.values()):
            mask = self.select_first_ranks(rank)
            request = Request(kind, state.round, Patch.from_vector(state.weights, mask), mask)
            assignments[rank] = Assignment(request, self.expect(rank))
        return {site: assignments[rank] for site, rank in ranks.items()}

    def expect(self, rank: int) -> UpdateSpec:
        """Return what a site of a rank has to return, by default the slots that it receives."""
        return UpdateSpec(mask=self.select_first_ranks(rank))

    def select_first_ranks(self, rank: int) -> Mask:
        """Return the entries of a site of this rank: the first slots of every module, and the entries of no adapter."""
        return self.slots.select_first(rank) | self.slots.other_entries

    def get_site_rank(self, site: Site) -> int:
        """Return the rank r_k of a site, computed at the site; the server computes the same."""
        rank = self.config.get_rank(site.name)
        return min(rank, _get_own_rank(site) or rank)

    def require_affordable(self, request: Request, site: Site) -> Mask:
        """Return the entries that a request trains, which lie within the site's own rank.

        Raises:
            RejectedMessage: the request asks for more; the site does not train.
        """
        budget = self.select_first_ranks(self.get_site_rank(site))
        if not request.trainable <= budget:
            raise RejectedMessage("E_MASK", "trainable", budget, request.trainable, "server")
        return request.trainable


def _get_own_rank(site: Site) -> int | None:
    return site.site_settings.rank if isinstance(site.site_settings, RankSiteConfig) else None
