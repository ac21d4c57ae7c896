"""SCBF (Shao et al. 2020), Algorithm 2, with SCBFwP, FAwP and DSSGD: sites reveal a part of their change.

======= ==================================================================== ============================
SCBF    a site reveals the channels that moved most; the server adds them up Algorithm 2; section 3
SCBFwP  SCBF whose server removes the units that are idle most often (APoZ)  section 3.3; section 3.8
FAwP    federated averaging with the same pruning, to show its effect        section 4.2; section 3.10
DSSGD   a site reveals the single parameters that changed most               section 3.9
======= ==================================================================== ============================

The last column names the place in the paper, and in docs/algorithms.md. The papers: "Stochastic Channel-Based Federated
Learning With Neural Network Pruning for Medical Data Privacy Preservation", JMIR Form. Res. 4(12):e17265, and
Shokri and Shmatikov, "Privacy-Preserving Deep Learning", CCS 2015.

A channel is a path from an input to an output unit; its norm adds the squared deltas on it (``scores/scbf``). Rounds
and aggregation are ``support/selective.py``, the pruning is ``support/unit_pruning.py``. A site reveals where its data
moved the model most: the upload has no noise and gives no formal privacy guarantee (section 3.12, deviation 12). The
update counters of DSSGD's paper, which decide what a site downloads first, are replaced by the size of the change that
it lacks.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, TypeVar, final

from pydantic import Field
from torch import Tensor

from ..core.exchange import Contribution
from ..core.mask import Mask, floor_fraction, top_k
from ..core.needs import Needs
from ..core.params import Layout
from ..core.seeds import make_generator
from ..training import Site
from .aggregation.weighted import weigh_by_examples, weighted_sum
from .method import MethodConfig, SiteSettings
from .scores.scbf.groups import Biases, Groups, Selection
from .scores.scbf.selection import build_groups
from .support.selective import (
    WHOLE_UNITS,
    Aggregation,
    SelectiveMethod,
    SelectiveState,
    aggregate_revealed,
    list_selective_needs,
)
from .support.unit_pruning import PruningConfig, PruningMethod


class RevealingConfig(MethodConfig):
    """Settings of rounds in which sites reveal a share of their change."""

    rate: float = Field(0.3, gt=0, le=1)
    """share of the parameters that a site uploads in a round"""
    download_rate: float = Field(1.0, gt=0, le=1)
    """share of the parameters that a site receives in a round, those that have changed most since it received them"""
    aggregation: Aggregation = "sum"
    """sum: add all deltas (the papers; a server learning rate of K); mean: weighted by examples, absent deltas are
    zero; count: average over the sites that reveal an entry"""


RevealingConfigT = TypeVar("RevealingConfigT", bound=RevealingConfig)


class RevealingMethod(SelectiveMethod[RevealingConfigT]):
    """A selective method whose server adds the revealed deltas or takes a mean."""

    @property
    def download_rate(self) -> float:
        return self.config.download_rate

    def aggregate(self, state: SelectiveState, contributions: Sequence[Contribution]) -> Tensor:
        return aggregate_revealed(state, contributions, self.config.aggregation, self.parameters)


class ChannelConfig(RevealingConfig):
    """Settings of SCBF's rounds."""

    rate: float = Field(0.3, gt=0, le=1)
    """alpha: share of the channel paths that a site selects in a round"""
    budget: float | None = Field(None, gt=0, le=1)
    """instead of rate: exact share of the parameters that a site uploads"""
    selection: Selection = "positive"
    """positive: reveal the entries on a selected path; negative: those on no other path"""
    biases: Biases = "selected"
    """biases travel with the selected paths, never (as printed in the paper), or all"""

    def needs(self) -> Needs:
        return super().needs() | list_selective_needs(self.aggregation) | {WHOLE_UNITS}


ChannelConfigT = TypeVar("ChannelConfigT", bound=ChannelConfig)


class ChannelSiteConfig(SiteSettings):
    """Settings that a site may choose in its site file."""

    rate: float | None = Field(None, gt=0, le=1)
    """alpha at this site"""
    budget: float | None = Field(None, gt=0, le=1)
    """share of the parameters that this site uploads"""


class ChannelSelector:
    """Selects the entries of a delta that lie on the channels with the largest change."""

    def __init__(self, config: ChannelConfig, seed: int):
        self._config, self._seed = config, seed
        self._groups: Groups | None = None

    def select(self, delta: Tensor, layout: Layout, site: str, t: int, site_settings: Any = None) -> Mask:
        """Return the entries of a delta ``(P,)`` of a layout that the site of this name reveals in round ``t``.

        The site's own settings come first.
        """
        rate, budget = self._choose_share(site_settings)
        groups = self._get_groups(layout)
        if budget is not None:
            return groups.select_by_budget(delta, budget)
        generator = make_generator(self._seed, "channels", site, t)
        return groups.select_by_rate(delta, rate, self._config.selection, generator)

    def _choose_share(self, site_settings: Any) -> tuple[float, float | None]:
        """Return the rate and the budget of a site, whose own settings come first."""
        own = site_settings if isinstance(site_settings, ChannelSiteConfig) else ChannelSiteConfig()
        return own.rate or self._config.rate, own.budget or (self._config.budget if own.rate is None else None)

    def describe(self, layout: Layout) -> str:
        """Return the groups of a network and the threshold, as display text."""
        groups, budget = self._get_groups(layout), self._config.budget
        if budget is None:
            return f"{groups.description}, {groups.threshold_description}"
        return f"{groups.description}, {floor_fraction(budget, layout.num_parameters):,} parameters a message"

    def _get_groups(self, layout: Layout) -> Groups:
        # The groups depend on the structure alone, which pruning changes; the last ones serve all sites of a round.
        if self._groups is None or self._groups.layout != layout:
            self._groups = build_groups(layout, self._config.biases)
        return self._groups


class ChannelMethod(RevealingMethod[ChannelConfigT]):
    """A method whose sites reveal channels."""

    SiteConfig = ChannelSiteConfig

    @cached_property
    def selector(self) -> ChannelSelector:
        return ChannelSelector(self.config, self.seed)

    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        return self.selector.select(delta.cpu(), site.layout, site.name, t, site.site_settings)

    def describe(self, state: SelectiveState | None = None) -> str:
        return self.selector.describe(self.layout) if state is None else ""


@final
class SCBF(ChannelMethod[ChannelConfig]):
    """Sites return the entries on their most changed channel paths; the server adds the deltas."""

    name = "scbf"
    Config = ChannelConfig
    trains_all_entries = True


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


class DSSGDConfig(RevealingConfig):
    def needs(self) -> Needs:
        return list_selective_needs(self.aggregation)


@final
class DSSGD(RevealingMethod[DSSGDConfig]):
    """Sites return the single parameters that changed most, and all running statistics; the server adds the deltas."""

    name = "dssgd"
    Config = DSSGDConfig
    trains_all_entries = True

    def reveal(self, delta: Tensor, site: Site, t: int) -> Mask:
        parameters = Mask.from_tensors(site.layout, lambda tensor: tensor.role != "buffer")
        return top_k(delta.abs(), floor_fraction(self.config.rate, parameters.count), within=parameters) | ~parameters
