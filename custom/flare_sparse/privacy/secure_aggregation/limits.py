"""Which sums over the updates of one request a site helps to reveal."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

FEWEST_SITES = 3
"""Fewest sites of a sum: of a sum of two, each site can subtract its own values."""
MOST_SETS = 2
"""Most different sets of sites whose sums a site reveals for one request."""


def find_difference_violation(earlier: Iterable[Collection[str]], survivors: Collection[str], min_sites: int) -> str:
    """Return why a sum must not be revealed beside the earlier ones of the same request; empty if it may be.

    Sites answer a repeated request with the same values, so the difference of two sums is a sum over the sites that are
    in one of them only. It must have as many sites as any other sum. With at most two different sets no other
    combination has fewer.

    >>> find_difference_violation([{"a", "b", "c", "d"}], {"a", "b", "c"}, 3)
    'the sum differs by 1 of the sites from an earlier one of the same request; the minimum is 3'

    Args:
        earlier: sites of the sums that this site has revealed for the request, in earlier attempts.
        survivors: sites of the new sum.
        min_sites: fewest sites of a sum.
    """
    new, known = frozenset(survivors), {frozenset(sites) for sites in earlier}
    if new in known:
        return ""
    for sites in sorted(known, key=sorted):
        if (difference := len(sites ^ new)) < min_sites:
            return (
                f"the sum differs by {difference} of the sites from an earlier one of the same request; the minimum is "
                f"{min_sites}"
            )
    if len(known) >= MOST_SETS:
        return f"sums over {len(known)} different sets of sites were revealed for the same request, the limit"
    return ""


@dataclass(frozen=True)
class SumRules:
    """What both ends of a job with ``wire.aggregation: masked`` or ``fixed_point`` know of its sums.

    Attributes:
        bound: largest absolute change of a parameter, which decides the ring.
        min_sites: fewest sites of a sum.
        is_padded: whether the values are padded, so that the server reads the sum alone.
    """

    bound: float
    min_sites: int = FEWEST_SITES
    is_padded: bool = True
