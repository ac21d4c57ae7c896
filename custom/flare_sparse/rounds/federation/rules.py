"""Quorum of a round, quarantine of sites, and limits of the weight of one site."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...core.errors import RoundFailed
from ...core.exchange import Contribution
from ...methods.aggregation.weighted import compute_common_cap
from ...tasks.task import TEST_EXAMPLES, VALIDATION_EXAMPLES

MAX_QUARANTINE_ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class RoundRules:
    """Rules by which a round is committed.

    Attributes:
        min_sites: fewest contributions that commit a round.
        min_weight: smallest share of the registered examples of the sites asked that commits a round.
        retries: further attempts at a round before the run stops.
        round_s: seconds after which an attempt ends with the replies that have arrived; None: the transport decides.
        max_share: largest share of a round's weight that one site may have.
        clip_norm: largest L2 norm of a site's delta; longer deltas are clipped; None: no bound.
        max_norm_ratio: largest ratio of the L2 norm of a site's delta to the median of the round's; None: no bound.
            It does not apply with ``clip_norm``.
        examples_tolerance: relative deviation from the registered number of examples that is accepted.
        quarantine_after: rounds in a row without an accepted update after which a site is quarantined; 0: never.
        examples: known numbers of training examples by site; a site that reports more is rejected, with the tolerance.
        patience: models in a row that are not better on validation examples, after which the run ends; None: never.
    """

    min_sites: int = 1
    min_weight: float = 0.0
    retries: int = 2
    round_s: float | None = None
    max_share: float = 1.0
    clip_norm: float | None = None
    max_norm_ratio: float | None = 100.0
    examples_tolerance: float = 0.1
    quarantine_after: int = 3
    examples: Mapping[str, int] = field(default_factory=dict)
    patience: int | None = None


@dataclass(frozen=True)
class SiteHistory:
    """History of each site's examples and misses.

    A site registers its number of training examples with its first accepted update, and its numbers of test and
    validation examples with the first one that carries metrics. A site without an accepted update in
    ``quarantine_after`` rounds in a row is quarantined for 1 round, then for 2, 4, 8 and at most 16 rounds, with one
    request in between. One accepted update ends this.

    Attributes:
        registered: training examples (n_k) by site.
        tested: test examples by site.
        validated: validation examples by site.
        missed: rounds in a row without an accepted update, by site.
        quarantined: remaining rounds of quarantine, by site.
    """

    registered: dict[str, int] = field(default_factory=dict)
    tested: dict[str, float] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)
    validated: dict[str, float] = field(default_factory=dict)

    def select_available(self, sites: Sequence[str], rules: RoundRules) -> list[str]:
        """Return the sites that are not quarantined, or all sites if too few remain."""
        available = [site for site in sites if not self.quarantined.get(site)]
        # A quarantine must never stop a run that the quarantined sites could save.
        return available if len(available) >= max(1, rules.min_sites) else list(sites)

    def find_violation(self, contribution: Contribution, rules: RoundRules) -> str | None:
        """Return the reason code for rejecting a contribution; None if its numbers of examples are acceptable.

        The number of training examples must not exceed the known one, and all numbers must be near the registered
        ones. A site must not gain weight in the course of a run.
        """
        site, known_examples = contribution.site, rules.examples.get(contribution.site)
        if known_examples is not None and contribution.num_examples > known_examples * (1 + rules.examples_tolerance):
            return "E_WEIGHT"
        registered = self.registered.get(site, contribution.num_examples)
        if not _is_near(contribution.num_examples, registered, rules):
            return "E_WEIGHT"
        for count, registered_counts in self._counts.items():
            examples = contribution.metrics.get(count)
            if examples is not None and not _is_near(examples, registered_counts.get(site, examples), rules):
                return "E_METRICS"
        return None

    @property
    def _counts(self) -> dict[str, dict[str, float]]:
        """Registered numbers of examples that metrics are computed from, by name of the number and by site."""
        return {TEST_EXAMPLES: self.tested, VALIDATION_EXAMPLES: self.validated}

    def register(self, contribution: Contribution) -> SiteHistory:
        """Return the history with a site's numbers of examples; numbers registered earlier are kept."""
        site, metrics = contribution.site, contribution.metrics
        tested = {site: metrics[TEST_EXAMPLES]} if TEST_EXAMPLES in metrics else {}
        validated = {site: metrics[VALIDATION_EXAMPLES]} if VALIDATION_EXAMPLES in metrics else {}
        return replace(
            self,
            registered={site: contribution.num_examples} | self.registered,
            tested=tested | self.tested,
            validated=validated | self.validated,
        )

    def record_round(self, accepted: Collection[str], asked: Collection[str], rules: RoundRules) -> SiteHistory:
        """Return the history after a committed round.

        Args:
            accepted: sites with an accepted update.
            asked: sites that received a request, or should have replied to the handshake.
            rules: number of misses after which a quarantine begins.
        """
        missed = dict(self.missed)
        quarantined = {site: rounds - 1 for site, rounds in self.quarantined.items() if rounds > 1}
        # Sites in quarantine are not asked and keep their count, so that the next miss doubles the quarantine.
        for site in asked:
            if site in accepted:
                missed.pop(site, None)
                quarantined.pop(site, None)
                continue
            missed[site] = missed.get(site, 0) + 1
            excess = missed[site] - rules.quarantine_after
            if rules.quarantine_after and excess >= 0:
                quarantined[site] = min(2**excess, MAX_QUARANTINE_ROUNDS)
        return replace(self, missed=missed, quarantined=quarantined)

    def compute_share(self, contributed: Collection[str], asked: Collection[str], max_share: float = 1.0) -> float:
        """Return the contributing sites' share of the examples of all sites that received the request.

        A site without a registered number of examples counts with the mean of the others.

        Args:
            contributed: sites with a contribution.
            asked: sites that received a request.
            max_share: largest share that one site may have, as in a sum. Without it, one false claim of many examples
                would keep every round without that site below the quorum.
        """
        registered = {site: self.registered[site] for site in asked if site in self.registered}
        if registered and max_share < 1:
            limit = _compute_limit(list(registered.values()), max_share)
            registered = {site: min(examples, limit) for site, examples in registered.items()}
        mean = sum(registered.values()) / len(registered) if registered else 1.0
        total = sum(registered.get(site, mean) for site in asked)
        return sum(registered.get(site, mean) for site in contributed) / total if total else 0.0

    def has_quorum(self, contributed: Collection[str], asked: Collection[str], rules: RoundRules) -> bool:
        """Whether a round may be committed, by sites and by weight; zero contributions never meet the quorum."""
        # Never capped by the number of sites asked: a hospital that requires five contributions must not find itself
        # in a sum of two because three sites are away.
        if not contributed or len(contributed) < rules.min_sites:
            return False
        return self.compute_share(contributed, asked, rules.max_share) >= rules.min_weight


def require_min_sites(sites: Collection[str], min_sites: int) -> None:
    """Raise unless a run has enough sites to commit a round.

    Args:
        sites: sites that can take part.
        min_sites: setting ``federation.min_sites``.

    Raises:
        RoundFailed: too few sites; the text names them and the setting.
    """
    if len(sites) < max(1, min_sites):
        raise RoundFailed(
            f"federation.min_sites is {min_sites}, but only {len(sites)} "
            f"{'site is' if len(sites) == 1 else 'sites are'} there: {', '.join(sorted(sites)) or 'none'}. Start or "
            "add the missing sites, or lower federation.min_sites"
        )


def _is_near(value: float, registered: float, rules: RoundRules) -> bool:
    return abs(value - registered) <= rules.examples_tolerance * registered


def cap_contributions(
    contributions: Sequence[Contribution], max_share: float
) -> tuple[list[Contribution], dict[str, int]]:
    """Cap the weight of each site to ``max_share`` of the sum.

    The largest sites are cut to one common number of examples, the largest integer that keeps the bound; the others
    stay unchanged. With too few sites for the bound, all weigh the same.

    >>> from flare_sparse.core.exchange import Contribution, Patch
    >>> three = [Contribution(f"site-{n}", Patch.empty(1), "weights", n) for n in (10, 30, 960)]
    >>> cap_contributions(three, 0.5)[1]
    {'site-960': 40}

    Returns:
        The contributions, and the new number of examples of each site that was capped.
    """
    if max_share >= 1 or not contributions:
        return list(contributions), {}
    limit = _compute_limit([contribution.num_examples for contribution in contributions], max_share)
    capped = {c.site: limit for c in contributions if c.num_examples > limit}
    counted = [
        replace(
            contribution,
            num_examples=capped.get(contribution.site, contribution.num_examples),
            capped_from=contribution.num_examples,
            max_share=max_share,
        )
        for contribution in contributions
    ]
    return counted, capped


def _compute_limit(examples: Sequence[int], max_share: float) -> int:
    """Return the number of examples that the largest sites are capped to."""
    # Rounded down to keep the bound; at least 1, since a weight of 0 would divide by zero if all were capped to it.
    return max(math.floor(compute_common_cap(examples, max_share)), 1)
