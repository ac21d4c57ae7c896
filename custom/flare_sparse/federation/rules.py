"""When a round counts, whom it asks, and how much one site may weigh."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..aggregation.weighted import compute_common_cap
from ..exchange import Contribution

MAX_QUARANTINE_ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """When a round counts.

    Attributes:
        min_sites: fewest contributions that a round may be committed with.
        min_weight: smallest share of the registered examples of the sites asked that must have contributed.
        retries: times a round is asked again before the run stops.
        max_share: largest share of a round's weight that one site may have.
        clip_norm: a site's change that is longer (L2) is shortened to this; None: none is.
        examples_tolerance: how far a site's number of examples may move from the one it registered with, as a share.
        quarantine_after: rounds in a row without a usable answer after which a site is left out for a while; 0: never.
        examples: training examples that are known of sites beforehand; a claim beyond is refused, with the tolerance.
    """

    min_sites: int = 1
    min_weight: float = 0.0
    retries: int = 2
    max_share: float = 1.0
    clip_norm: float | None = None
    examples_tolerance: float = 0.1
    quarantine_after: int = 3
    examples: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Roster:
    """What the server remembers of its sites.

    A site registers the number of its training examples with its first usable answer, and that of its test examples with
    the first that judges a model. A site that gave no usable answer
    in ``quarantine_after`` rounds in a row rests for 1 round, then for 2, 4, 8 and at most 16, and is asked again in
    between; one usable answer and it is a site like the others.

    Attributes:
        registered: training examples (n_k) by site.
        tested: test examples by site.
        missed: rounds in a row without a usable answer.
        quarantined: rounds that a site is still left out for.
    """

    registered: dict[str, int] = field(default_factory=dict)
    tested: dict[str, float] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)

    def select_available(self, sites: Sequence[str], rules: RoundRules) -> list[str]:
        """Who may be asked now: all that do not rest, or everybody when too few are left."""
        awake = [site for site in sites if not self.quarantined.get(site)]
        return awake if len(awake) >= max(1, rules.min_sites) else list(sites)

    def find_violation(self, update: Contribution, rules: RoundRules) -> str | None:
        """The code that an answer is refused with, where it speaks of more examples than ``rules`` say that there are, or
        of other numbers than the site's first answer, which registers them.
        """
        site, most = update.site, rules.examples.get(update.site)
        if most is not None and update.num_examples > most * (1 + rules.examples_tolerance):
            return "E_WEIGHT"
        if not _near(update.num_examples, self.registered.setdefault(site, update.num_examples), rules):
            return "E_WEIGHT"
        tested = update.metrics.get("test_examples")
        if tested is not None and not _near(tested, self.tested.setdefault(site, tested), rules):
            return "E_METRICS"
        return None

    def record_round(self, answered: Collection[str], asked: Collection[str], rules: RoundRules) -> None:
        """A round is over: count misses, send to rest, let others come back."""
        for site in list(self.quarantined):
            self.quarantined[site] -= 1
            if self.quarantined[site] <= 0:
                del self.quarantined[site]
        for site in asked:
            if site in answered:
                self.missed.pop(site, None)
                self.quarantined.pop(site, None)
                continue
            self.missed[site] = self.missed.get(site, 0) + 1
            beyond = self.missed[site] - rules.quarantine_after
            if rules.quarantine_after and beyond >= 0:
                self.quarantined[site] = min(2**beyond, MAX_QUARANTINE_ROUNDS)

    def compute_share(self, contributed: Collection[str], asked: Collection[str], max_share: float = 1.0) -> float:
        """Share of the examples of the sites asked that contributed; one that never registered counts as the mean.

        As in a sum, no site is more than ``max_share`` of all: one large claim is not most of what was promised.
        """
        known = {site: self.registered[site] for site in asked if site in self.registered}
        if known and max_share < 1:
            limit = _limit(list(known.values()), max_share)
            known = {site: min(examples, limit) for site, examples in known.items()}
        usual = sum(known.values()) / len(known) if known else 1.0
        total = sum(known.get(site, usual) for site in asked)
        return sum(known.get(site, usual) for site in contributed) / total if total else 0.0


def _near(now: float, registered: float, rules: RoundRules) -> bool:
    return abs(now - registered) <= rules.examples_tolerance * registered


def cap_contributions(updates: Sequence[Contribution], max_share: float) -> tuple[list[Contribution], dict[str, int]]:
    """No site weighs more than ``max_share`` of the sum; returns the updates and the new number of examples of those cut.

    The largest sites are cut to one common number of examples, the largest whole one that keeps the rule; the others
    stay as they are. Where there are too few sites for the rule, all weigh the same.

    >>> from flare_sparse.exchange import Contribution, Patch
    >>> three = [Contribution(f"site-{n}", Patch.empty(1), "weights", n) for n in (10, 30, 960)]
    >>> cap_contributions(three, 0.5)[1]
    {'site-960': 40}
    """
    if max_share >= 1 or not updates:
        return list(updates), {}
    limit = _limit([update.num_examples for update in updates], max_share)
    cut = {update.site: limit for update in updates if update.num_examples > limit}
    counted = [cut.get(update.site, update.num_examples) for update in updates]
    return [
        replace(u, num_examples=n, capped_from=u.num_examples, max_share=max_share)
        for u, n in zip(updates, counted, strict=True)
    ], cut


def _limit(examples: Sequence[int], max_share: float) -> int:
    """The whole number of examples that the largest sites are cut to."""
    return max(math.floor(compute_common_cap(examples, max_share)), 1)
