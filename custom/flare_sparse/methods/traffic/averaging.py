"""Traffic of methods that average models and may fine-tune the result."""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise

from ...core.mask import Mask, floor_fraction
from .base import FINETUNE, TRAIN, MessageFacts, SelectionBounds, Traffic, WholeModelTraffic

SCORE = "score"
"""The kind of the requests before round 1 of a method that scores the initial model."""


class AveragingTraffic(Traffic):
    """Rounds, and fine-tuning where the settings provide for it."""

    final_kinds = frozenset({FINETUNE})

    def count_requests(self, kind: str, t: int) -> int:
        # A site whose copy of the job provides for no fine-tuning does not train once more, however the server asks.
        if kind == FINETUNE and self.config.finetune is None:
            return 0
        return super().count_requests(kind, t)


class FedAvgTraffic(WholeModelTraffic, AveragingTraffic):
    """Every request trains all entries."""


class SparsifyTraffic(AveragingTraffic):
    """Masks that a schedule makes smaller."""

    prunes_for_good = True

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        """Return the number of live entries, twice: the schedule alone decides it.

        Early stopping may end the schedule in any round, so that the model to fine-tune has this number or more.
        """
        sparsity = max((self.config.compute_sparsity(s) for s in range(1, t)), default=0.0)
        live = self.layout.size - floor_fraction(sparsity, self._num_prunable)
        return live, self.layout.size if kind == FINETUNE else live

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        return message.keep_selection("the trained weights decide which entries are pruned")

    def count_paper_scalars(self, sites: int) -> int:
        """Return ``L * sum_t (N_{t-1} + N_t)``, the count that reproduces the paper's Table 1 exactly.

        It counts an upload at its size after the pruning, which the site cannot know yet; the ledger counts what is
        sent (docs/algorithms.md, section 2.7, deviation 6).
        """
        total, pool = self.layout.size, self._num_prunable
        live = [total] + [
            total - floor_fraction(self.config.compute_sparsity(t), pool) for t in range(1, self.config.rounds + 1)
        ]
        return int(sites * sum(before + after for before, after in pairwise(live)))

    @cached_property
    def _num_prunable(self) -> int:
        return Mask.from_preset(self.layout, self.config.prunable).count


class ScoredMaskTraffic(AveragingTraffic):
    """Scores of the initial model, then rounds inside masks of a number of entries that the settings say."""

    round_kinds = frozenset({SCORE, TRAIN})
    prunes_for_good = True

    def count_requests(self, kind: str, t: int) -> int:
        if kind == SCORE:
            return int(self.config.score_steps) if t == 0 else 0
        return super().count_requests(kind, t)

    def count_score_lots(self, lots_in_pass: int) -> int:
        return int(self.config.score_steps * (self.config.minibatches or lots_in_pass))

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        """Return the fewest and most entries of a mask: one number after the scores, a range while there are steps."""
        maskable = self._num_maskable
        others, num_live = self.layout.size - maskable, floor_fraction(1 - self.config.sparsity, maskable)
        if kind == SCORE:
            return others + (num_live if self.config.score_steps > 1 else maskable), self.layout.size
        # The densities of single tensors are rounded, so that a random mask may have some entries more or less.
        is_drawn = self.config.scores == "random" and self.config.random_layers == "erk"
        live = others + (self._random_mask_size if is_drawn else num_live)
        return live, live

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        if self.config.scores == "random":
            return None
        return message.keep_selection("the sites' scores decide which entries are live")

    @cached_property
    def _num_maskable(self) -> int:
        return Mask.from_preset(self.layout, self.config.maskable).count

    @cached_property
    def _random_mask_size(self) -> int:
        """Number of entries of the random mask."""
        return int(self.method.draw_mask().count)
