"""What a run asks of a site: kinds and numbers of requests, entries to train, and the sizes of messages.

A site refuses requests beyond these bounds, whatever its policy says; an estimate computes bytes from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ...compute.structure.scaling import build_statistics_mask
from ...core.exchange import EVALUATE, STATISTICS

TRAIN = "train"
"""The kind of the request of an ordinary round: train, and return what ``Method.update_content`` names."""
FINETUNE = "finetune"
"""The kind of the last request: fine-tune the model and report the metrics of the result."""
ADAPT = "adapt"
"""The kind of the last request: adapt the model and report its metrics."""


@dataclass(frozen=True)
class MessageFacts:
    """A message of a dry run, in which noise stands for the trained values.

    Attributes:
        direction: "down" from the server to the site, "up" from the site to the server.
        kind, round: of the request that the message is or answers.
        site: name of the site.
        count: number of entries in the message of the dry run.
        selection_bytes: bytes in which the message of the dry run names its entries; 0 if the receiver knows them.
        num_sites: number of sites of the run.
        site_settings: the method's settings from the site file; None if the job's settings apply.
    """

    direction: Literal["down", "up"]
    kind: str
    round: int
    site: str
    count: int
    selection_bytes: int
    num_sites: int
    site_settings: Any = None

    def fix_count(self, reason: str) -> SelectionBounds:
        """Return the bounds where the settings fix the number of entries and the data decides which ones they are."""
        return SelectionBounds(self.count, self.count, reason)

    def keep_selection(self, reason: str) -> SelectionBounds | None:
        """Return the bounds where the count is fixed; None where the receiver already holds the selection."""
        return self.fix_count(reason) if self.selection_bytes else None


@dataclass(frozen=True)
class SelectionBounds:
    """Fewest and most entries of a message whose entries the data chooses.

    Attributes:
        least, most: bounds of the number of entries; a run need not reach them.
        reason: what the data decides, as display text.
        is_known: the receiver knows which entries they are, so that naming them needs no bytes.
    """

    least: int
    most: int
    reason: str
    is_known: bool = False


class Traffic:
    """The requests and messages of a method's run; by default those of rounds of training that the settings bound.

    Args:
        method: the method, of which only settings and layout are read.
    """

    round_kinds: ClassVar[frozenset[str]] = frozenset({TRAIN})
    """Kinds of the requests of rounds 0 to ``config.rounds``; a site answers no others."""
    final_kinds: ClassVar[frozenset[str]] = frozenset()
    """Kinds of the requests after the last round, besides ``"evaluate"``."""
    prunes_for_good: ClassVar[bool] = False
    """Whether an entry that no longer trains never trains again; a site counts its return as a new start of the job."""

    def __init__(self, method: Any):
        self.method, self.config, self.layout = method, method.config, method.layout

    def count_requests(self, kind: str, t: int) -> int:
        """Return how many different requests of a kind a site receives in round ``t``; 0: the method sends none.

        A site answers no other requests, however the server asks.
        """
        if kind == STATISTICS:
            return int(t == 0 and build_statistics_mask(self.layout).count > 0)
        if kind in self.round_kinds:
            return int(0 <= t <= self.config.rounds)
        return int((kind == EVALUATE or kind in self.final_kinds) and t == self.config.rounds + 1)

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        """Return the fewest and most entries that a request of round ``t`` asks a site to train or to score.

        A site answers no requests for fewer or more. By default the settings bound nothing.
        """
        return 0, self.layout.size

    def sends_initial_model(self, kind: str, t: int) -> bool:
        """Return whether a request carries the initial model of the job, or a part of it, which a site can verify.

        Statistics of inputs are not a part of it.
        """
        return kind in self.round_kinds and t <= 1

    def count_score_lots(self, lots_in_pass: int) -> int:
        """Return the number of noisy gradients that a site computes before the first training with privacy.

        Args:
            lots_in_pass: expected number of lots of one pass over the site's subjects.
        """
        return 0

    def bound_selection(self, message: MessageFacts) -> SelectionBounds | None:
        """Return the fewest and most entries of a message whose entries the data chooses; None: the settings decide.

        Used for estimates only; a run does not call it. Messages with metrics alone are not passed to it.
        """
        return None

    @property
    def named_sites(self) -> tuple[str, ...]:
        """The sites that the settings name, which an estimate without data assumes to take part."""
        return ()

    def count_paper_scalars(self, sites: int) -> int | None:
        """Return the number of scalars that the paper would count for a whole run; None where it defines no count."""
        return None


class WholeModelTraffic(Traffic):
    """Every request trains all entries."""

    def bound_trainable(self, kind: str, t: int) -> tuple[int, int]:
        return self.layout.size, self.layout.size
