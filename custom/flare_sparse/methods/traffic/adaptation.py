"""Traffic of methods that end with a step at each target site."""

from __future__ import annotations

import torch

from .base import ADAPT, MessageFacts, SelectionBounds, Traffic, WholeModelTraffic


class AdaptationTraffic(Traffic):
    """Rounds at the sites that are no targets, then the request to adapt."""

    final_kinds = frozenset({ADAPT})

    @property
    def named_sites(self) -> tuple[str, ...]:
        targets: tuple[str, ...] = self.config.targets
        return targets


class WholeAdaptationTraffic(WholeModelTraffic, AdaptationTraffic):
    """Every request trains all entries."""


class GatedTraffic(AdaptationTraffic):
    """Models without the channels that are closed for good."""

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        closed = self.method.gates.select_closed(torch.zeros(self.layout.size))
        may_close = closed.count and self.config.lasso > 0 and self.config.closed_channels == "permanent"
        if message.round == 1 or not may_close:
            return None
        size = self.layout.size
        is_known = message.direction == "up"
        return SelectionBounds(size - closed.count, size, "the Group Lasso decides which channels close", is_known)

    def count_paper_scalars(self, sites: int) -> int | None:
        """Return 2 (|theta| + |phi|) per round and site; the paper reports no traffic."""
        names = [f"site-{number}" for number in range(sites)]
        sampled = len(self.config.sample_training_sites(names, self.method.seed, 1))
        return 2 * int(self.config.rounds) * sampled * int(self.layout.num_parameters)
