"""Quorum of a round, quarantine of sites, and limits of the weight of one site."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from pydantic import Field

from ...core.errors import RoundFailed
from ...core.exchange import Contribution
from ...core.settings import Settings
from ...methods.aggregation.weighted import compute_common_cap
from ...tasks.task import COUNTS

MAX_QUARANTINE_ROUNDS = 16


class EarlyStopping(Settings):
    """End of a run whose model no longer gets better on validation examples."""

    patience: int = Field(10, ge=1)
    """rounds in a row without a better metric on validation examples, after which the run ends"""


class RoundRules(Settings):
    """Rules that decide when a round is committed and how much a site may weigh."""

    min_sites: int = Field(1, ge=1)
    """quorum: fewest contributions that commit a round"""
    min_weight: float = Field(0.0, ge=0, le=1)
    """smallest share of the requested sites' examples that commits a round"""
    max_share: float = Field(1.0, gt=0, le=1)
    """largest share of a round's total weight for one site; capping is recorded"""
    clip_norm: float | None = Field(None, gt=0)
    """largest L2 norm of a site's delta; a longer one is clipped, and clipping is recorded"""
    max_norm_ratio: float | None = Field(100.0, ge=1.5)
    """largest L2 norm of a site's delta, as a multiple of the median of the round's; a longer one is rejected (E_NORM);
    from three updates on, not with clip_norm; null: no bound"""
    examples_tolerance: float = Field(0.1, ge=0)
    """largest relative change of a site's number of examples from the one it first reported"""
    examples: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """agreed number of training examples by site, {hospital-a: 412}; a larger number is rejected"""
    quarantine_after: int = Field(3, ge=0)
    """consecutive rounds without a contribution after which a site is quarantined; 0: never"""
    round_minutes: float | None = Field(None, gt=0)
    """minutes after which an attempt at a round ends with the sites that have replied, if they meet the quorum; at most
    task_timeout_s; null: task_timeout_s alone ends it"""
    early_stopping: EarlyStopping | None = None
    """end the run when the metric on validation examples no longer improves, {patience: 10}; needs
    task.split.validation and method.participation 1; null: run all rounds"""
    retries: int = Field(2, ge=0)
    """number of times a failed round is retried before the run stops"""

    @property
    def round_s(self) -> float | None:
        """``round_minutes`` in seconds."""
        return None if self.round_minutes is None else 60 * self.round_minutes


@dataclass(frozen=True)
class SiteHistory:
    """History of each site's examples and misses.

    A site registers its number of training examples with its first accepted update, and its numbers of test and
    validation examples with the first one that carries metrics. A site without an accepted update in
    ``quarantine_after`` rounds in a row is quarantined for 1 round, then for 2, 4, 8 and at most 16 rounds, with one
    request in between. One accepted update ends this.

    Attributes:
        registered: training examples (n_k) by site.
        evaluated: examples that metrics are computed from, by name of their number and by site.
        missed: rounds in a row without an accepted update, by site.
        quarantined: remaining rounds of quarantine, by site.
    """

    registered: dict[str, int] = field(default_factory=dict)
    evaluated: dict[str, dict[str, float]] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    quarantined: dict[str, int] = field(default_factory=dict)

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
        for count in COUNTS:
            examples = contribution.metrics.get(count)
            known = self.evaluated.get(count, {}).get(site, examples)
            if examples is not None and known is not None and not _is_near(examples, known, rules):
                return "E_METRICS"
        return None

    def register(self, contribution: Contribution) -> SiteHistory:
        """Return the history with a site's numbers of examples; numbers registered earlier are kept."""
        site, metrics = contribution.site, contribution.metrics
        new = {count: {site: metrics[count]} for count in COUNTS if count in metrics}
        evaluated = {**self.evaluated, **{count: known | self.evaluated.get(count, {}) for count, known in new.items()}}
        return replace(self, registered={site: contribution.num_examples} | self.registered, evaluated=evaluated)

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
            max_share=max_share,
        )
        for contribution in contributions
    ]
    return counted, capped


def _compute_limit(examples: Sequence[int], max_share: float) -> int:
    """Return the number of examples that the largest sites are capped to."""
    # Rounded down to keep the bound; at least 1, since a weight of 0 would divide by zero if all were capped to it.
    return max(math.floor(compute_common_cap(examples, max_share)), 1)
