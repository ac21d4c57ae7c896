"""Round 0 of a network that scales its inputs: sites send statistics of these, which the first model holds pooled.

A base beside any method, which knows nothing of it: from round 1 on, requests, updates and states are the method's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.errors import PolicyRefusal
from ..core.exchange import Assignment, Contribution, Patch, Request, Update, UpdateSpec
from ..core.mask import Mask
from ..core.params import Layout
from ..inputs.scaling import (
    STATISTICS,
    InputScaler,
    StatisticsLayer,
    build_statistics_mask,
    drop_rests,
    join_rows,
    select_statistics,
    split_rows,
)
from ..privacy.release import SiteRelease, compute_step
from ..training import Site
from .method import Method, ModelState, broadcast


@dataclass(frozen=True)
class Unpooled(ModelState):
    """State of round 0, before the statistics are pooled: what the method starts from.

    Attributes:
        sites: all sites of the run.
    """

    sites: tuple[str, ...]


def pool_statistics(method: Method[Any, Any], *, short: bool = False) -> Method[Any, Any]:
    """Return a method with the exchange before its rounds, or itself for a network without statistics of inputs.

    Args:
        method: the method.
        short: whether statistics travel, and are used, without their rests.
    """
    if not build_statistics_mask(method.layout).count:
        return method
    kind = type(method)
    # A class of both, so that the method's own calls of these functions and the loop's are the same.
    own = {"is_short": short, "idle_kinds": kind.idle_kinds | {STATISTICS}}
    pooled: type[Method[Any, Any]] = type(kind.__name__, (PooledStatistics, kind), own)
    return pooled(method.config, method.layout, method.seed)


class PooledStatistics(Method[Any, Any]):
    """Before a class of methods among the bases: its sites send the statistics of their inputs first."""

    is_short: ClassVar[bool]

    @cached_property
    def _statistics_mask(self) -> Mask:
        return build_statistics_mask(self.layout)

    def init(self, weights: Tensor, sites: Sequence[str]) -> Any:
        return Unpooled(0, weights, tuple(sites))

    def get_state_class(self, start: Any) -> type[Any]:
        return super().get_state_class(self._leave_statistics(start))

    def model(self, state: Any) -> Patch:
        return super().model(self._leave_statistics(state))

    def measure(self, state: Any) -> dict[str, float]:
        return {} if isinstance(state, Unpooled) else super().measure(state)

    def describe(self, state: Any = None) -> str:
        return super().describe(None if state is None else self._leave_statistics(state))

    def count_requests(self, kind: str, t: int) -> int:
        return int(t == 0) if kind == STATISTICS else super().count_requests(kind, t)

    def ask(self, state: Any, sites: Sequence[str]) -> dict[str, Assignment]:
        if not isinstance(state, Unpooled):
            return super().ask(state, sites)
        # It carries no model: statistics depend on none.
        request = Request(STATISTICS, 0, Patch.empty(self._statistics_mask.size), self._statistics_mask)
        return broadcast(
            sites, Assignment(request, UpdateSpec(STATISTICS, self._statistics_mask, is_valid=self._can_be_statistics))
        )

    def answer(self, request: Request, site: Site) -> Update:
        if request.kind != STATISTICS:
            return super().answer(request, site)
        vector = torch.zeros(self._statistics_mask.size)
        inputs = list(site.trainer.collect_inputs(site.weights, StatisticsLayer).values())
        for (layer, statistics), values in zip(select_statistics(vector, self.layout), inputs, strict=True):
            statistics.copy_(layer.compute_statistics(values))
        if self.is_short:
            vector = drop_rests(vector, self.layout)
        if site.release is not None:
            coarsen_statistics(vector, site.release, self.layout)
        return Update(Patch.from_vector(vector, self._statistics_mask), STATISTICS, site.num_examples)

    def learn(self, state: Any, contributions: Sequence[Contribution]) -> Any:
        if not isinstance(state, Unpooled):
            return super().learn(state, contributions)  # type: ignore[safe-super]
        # In site-name order, so that the sums have the same bits in every environment.
        by_site = [select_statistics(contribution.patch.to_vector(), self.layout) for contribution in contributions]
        pooled = [parts[0][0].pool_statistics([part for _, part in parts]) for parts in zip(*by_site, strict=True)]
        start = self._statistics_mask.put(torch.cat([part.flatten() for part in pooled]), state.weights.clone())
        return super().init(drop_rests(start, self.layout) if self.is_short else start, state.sites)

    def _leave_statistics(self, state: Any) -> Any:
        """Return the method's own state, with the initial weights as they are."""
        return super().init(state.weights, state.sites) if isinstance(state, Unpooled) else state

    def _can_be_statistics(self, patch: Patch, examples: int) -> bool:
        """Return whether values can be the statistics of so many examples."""
        # A wrong count would move the scale of every site, and no later rule looks at it.
        parts = select_statistics(patch.to_vector(), self.layout)
        return all(layer.is_valid(part, examples) for layer, part in parts)


def coarsen_statistics(vector: Tensor, release: SiteRelease, layout: Layout) -> None:
    """Set the counts in a vector ``(P,)`` to the released number, and round the others to the grid of each input.

    Raises:
        PolicyRefusal: they say how inputs go together with covariates, which no grid bounds.
    """
    people = release.numbers.train
    for layer, statistics in select_statistics(vector, layout):
        if not isinstance(layer, InputScaler):
            raise PolicyRefusal("this site's policy: release: statistics with covariates; choose another task.scaling")
        count, (mean, deviation) = split_rows(statistics)
        steps = [compute_step(release.rule, value, people) or 1.0 for value in deviation.tolist()]
        step, is_enough = torch.tensor(steps, dtype=torch.float64), count >= release.rule.minimum
        coarse = [torch.where(is_enough, (part / step).round() * step, 0.0) for part in (mean, deviation)]
        statistics.copy_(join_rows(torch.where(is_enough, float(people), 0.0).double(), coarse))
