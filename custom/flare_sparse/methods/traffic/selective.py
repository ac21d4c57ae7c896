"""Traffic of methods whose sites reveal a part of their delta, and of the removal of units."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import torch

from ...compute.structure import build_live_mask
from ...core.mask import floor_fraction
from .base import TRAIN, MessageFacts, SelectionBounds, Traffic

COUNT: Final = "count"
"""The kind of the request, and the phase, in which sites count the zeros of every unit."""
REMOVED = "the zeros that sites count decide which units are removed"


class SelectiveTraffic(Traffic):
    """Uploads of some entries, and downloads of what they changed."""

    prunes_for_good = True

    def bound_live(self, t: int) -> tuple[int, int]:
        """Return the fewest and most live entries in round ``t``."""
        return self.layout.size, self.layout.size

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        return self.bound_live(t)[0], self.layout.size

    def bound_upload(self, message: MessageFacts, live: tuple[int, int]) -> tuple[int, int]:
        """Return the fewest and most entries that a site reveals, given those of the live entries."""
        return 0, live[1]

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        live, size = self.bound_live(message.round), self.layout.size
        least, most = self.bound_upload(message, live)
        if message.direction == "up":
            # A site that returns all live entries does not name them: the request did.
            reason = REMOVED if (least, most) == live else "training decides which entries a site reveals"
            return None if least == size else SelectionBounds(least, most, reason, (least, most) == live)
        if live[0] < size:
            return SelectionBounds(*live, REMOVED, is_known=message.selection_bytes == 0)
        if message.round == 1 or least == size:
            return None
        # A site that did not take part in the round before may have revealed less than this one.
        least = least if self.config.participation == 1 else 0
        return SelectionBounds(least, size, "the overlap of the uploads decides what is sent down")


class ParameterTraffic(SelectiveTraffic):
    """Uploads of a fixed share of single parameters, and of all running statistics."""

    def bound_upload(self, message: MessageFacts, live: tuple[int, int]) -> tuple[int, int]:
        parameters = self.method.parameters.count
        count = floor_fraction(self.config.rate, parameters) + self.layout.size - parameters
        return count, count


class ChannelTraffic(SelectiveTraffic):
    """Uploads of whole channels."""

    def bound_upload(self, message: MessageFacts, live: tuple[int, int]) -> tuple[int, int]:
        bounds: tuple[int, int] = self.method.selector.bound_upload(message.site_settings, self.layout, live)
        return bounds


class PruningTraffic(SelectiveTraffic):
    """Rounds after which sites count zeros, and the server removes units; sites return all that is left."""

    round_kinds = frozenset({COUNT, TRAIN})

    def bound_upload(self, message: MessageFacts, live: tuple[int, int]) -> tuple[int, int]:
        return live

    def sends_initial_model(self, kind: str, t: int) -> bool:
        # Units are counted after a round of training.
        return kind != COUNT and super().sends_initial_model(kind, t)

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        is_count = message.kind == COUNT and message.direction == "up"
        # A pruned structure travels as a selection without values.
        if is_count or (message.direction == "down" and message.count == 0):
            return message.fix_count(REMOVED) if self.bound_live(message.round)[0] < self.layout.size else None
        return super().bound_selection(message)

    def bound_live(self, t: int) -> tuple[int, int]:
        """Return the fewest and most live entries in round ``t``.

        Which units are removed is not known. Together they hold at most the sum of the entries of the largest units,
        and at least half the sum of the smallest, because an entry joins at most two units.
        """
        prunings = self.config.count_prunings(min(t, self.config.rounds))
        units = self.method.num_units
        removed = units - self.config.count_remaining(units, prunings)
        sizes = sorted(size for size, count in self._removable_units for _ in range(count))
        removed = min(removed, len(sizes))
        if not removed:
            return self.layout.size, self.layout.size
        most_removed, least_removed = sum(sizes[-removed:]), -(-sum(sizes[:removed]) // 2)
        return max(self.layout.size - most_removed, 0), self.layout.size - least_removed

    @cached_property
    def _removable_units(self) -> list[tuple[int, int]]:
        """For each layer, the number of entries that one unit takes part in and the number of units that may go."""
        layers = self.method.layers
        every = [torch.ones(layer.units, dtype=torch.bool) for layer in layers]
        units = []
        for number, layer in enumerate(layers):
            rest = [mask.clone() for mask in every]
            rest[number][0] = False
            size = self.layout.size - build_live_mask(self.layout, layers, rest).count
            units.append((size, layer.units - max(1, round(self.config.min_units_left * layer.units))))
        return units

    @property
    def named_sites(self) -> tuple[str, ...]:
        name = self.config.counting_site
        return () if name == "sites" else (name,)


class ChannelPruningTraffic(ChannelTraffic, PruningTraffic):
    """Uploads of whole channels of what is left."""
