"""Traffic of methods that share theirs with no other."""

from __future__ import annotations

from .base import MessageFacts, SelectionBounds, Traffic, WholeModelTraffic

TRAIN_ALONE = "train_alone"
"""The kind of the one request of local-only training: train for all rounds."""


class AloneTraffic(WholeModelTraffic):
    """One request, after which a site trains alone."""

    round_kinds = frozenset({TRAIN_ALONE})


class MovingMaskTraffic(Traffic):
    """Personal masks, of which entries are dropped and as many regrown."""

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        if self.config.initial_drop_fraction == 0:
            return None
        return message.fix_count("training decides which entries a site drops and regrows")


class LargestEntriesTraffic(WholeModelTraffic):
    """Uploads of the largest entries, and downloads of their union or of the largest entries of what the server has."""

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        size, down = self.method.upload_size, self.method.download_size
        num_buffers = self.layout.size - self.layout.num_parameters
        if message.direction == "up":
            reason = "the sites' deltas decide which entries are uploaded"
            return SelectionBounds(size, max(size + num_buffers, message.count), reason)
        if message.round == 1:
            return None
        # A site that did not take part in the round before receives all entries.
        if down is not None:
            reason = "the sum of the deltas decides which entries are sent down"
            return SelectionBounds(down, max(down + num_buffers, message.count), reason)
        most = min(self.layout.size, message.num_sites * size + num_buffers)
        return SelectionBounds(size, max(most, message.count), "the overlap of the uploads decides what is sent down")
