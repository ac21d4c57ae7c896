"""Traffic of adapters, of which sites may have different ranks."""

from __future__ import annotations

from .base import MessageFacts, SelectionBounds, Traffic


class RankedTraffic(Traffic):
    """Adapters of a rank for each site."""

    @property
    def named_sites(self) -> tuple[str, ...]:
        return tuple(self.config.ranks)


class SelectedRanksTraffic(RankedTraffic):
    """Uploads of the ranks with the highest scores."""

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        if message.direction == "down":
            return None
        slots, active = self.method.slots, self.method.get_active_factor(message.round)
        widths, rank = slots.get_slot_widths(active), min(self.config.get_rank(message.site), slots.rank)
        if self.config.budget == "slots":
            most = int(widths.sort(descending=True).values[: rank * slots.num_modules].sum())
        else:
            most = rank * int(widths.sum()) // slots.rank
        least = self.method.count_min_entries(active, message.site)
        most += slots.other_entries.count
        return SelectionBounds(least, most, "the scores decide which ranks a site sends")


class DecayingRanksTraffic(RankedTraffic):
    """Uploads of all ranks of a site, or of those that it has not given up."""

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        most = least = self.method.get_initial_rank(message.site)
        for _ in range(message.round - (message.direction == "down")):
            least = self.method.decay_rank(least)
        if least == most:
            return None
        fewest, largest = (self.method.select_first_ranks(rank).count for rank in (least, most))
        return SelectionBounds(fewest, largest, "training decides when a site gives up its last ranks")
