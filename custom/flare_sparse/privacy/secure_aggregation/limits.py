"""Which sums over sites' answers a site helps to reveal, so that no combination of them isolates few sites.

A site gives the same answer whenever it receives the same model again, so every sum over it is one more equation. The
rule: all members of a sum see the same members, or no values leave; a site that has revealed a sum over its answer
reveals no other one.

Why this is enough against a server without accomplices. Let n sites be the members of a sum, T the shares that open a
secret, O the sites whose values are in the sum that the server reads, R those that revealed shares, and d the most
members that the list of survivors of a site may lack. The server may show each site another list, but must open every
member: T sites say of a member in O that it survived, of one outside O that it did not, and each site says that it
survived itself. So a site of R outside O has T sites that deny it: either there is none, or R has at least T + 1
sites. As T >= 2 d,

    |O| >= n - floor(n d / T), and
    |R in O| - |O outside R| >= 2 T + 2 - n - d, or 2 T - n if R has no site outside O.

:func:`count_needed` bounds d such that the first is at least the minimum m, and the second at least m / 2. Each site is
in the R of one sum at most. So in a combination of two and more different sums, at least as many sites keep a factor
that is not zero as the second numbers add up to, m; of one sum, all of O do.
"""

from collections.abc import Iterable

from ...wire.stage import RevealedSum

FEWEST_SITES = 3
"""Fewest sites of a sum: of a sum of two, each site can subtract its own values."""


def compute_threshold(members: int, min_sites: int = FEWEST_SITES) -> int:
    """Return T: shares that recover a secret, and fewest sites that end a sum which ``members`` sites began.

    More than two thirds: an honest site reveals one share of each other site, of the one secret or of the other. A
    server that tells sites different things needs T answers of both kinds, which fewer than a third colluding sites do
    not give.

    >>> [compute_threshold(members) for members in (3, 4, 5, 8, 10)]
    [3, 3, 4, 6, 7]
    """
    return max(2 * members // 3 + 1, min_sites)


def count_needed(members: int, min_sites: int = FEWEST_SITES) -> int:
    """Return how many of the members must be left in a sum; up to a minimum of six it is the threshold.

    >>> [count_needed(members) for members in (3, 4, 5, 8, 10)]
    [3, 3, 4, 6, 7]
    >>> [count_needed(12, min_sites) for min_sites in (6, 9, 12)]
    [9, 10, 12]
    """
    threshold = compute_threshold(members, min_sites)
    # The most survivors that a server may deny: see the module's text. The second is the largest d with
    # floor(members d / threshold) <= members - min_sites.
    missing = min(
        members - threshold,
        (threshold * (members - min_sites + 1) - 1) // members,
        2 * threshold + 2 - members - (min_sites + 1) // 2,
    )
    return members - max(missing, 0)


def find_violation(earlier: Iterable[RevealedSum], new: RevealedSum) -> str:
    """Return why a site must not help to reveal a sum after those that it has revealed; empty if it may.

    Sums are compared that have the same request of a run, whatever its model, or the same kind and model in any round
    of any run. They must be over the same sites and, if this site's answer is the same, with the same shares.

    Args:
        earlier: sums that this site has helped to reveal, of all runs.
        new: the sum; its survivors may be unknown yet.
    """
    for known in earlier:
        is_same_request = (known.run, known.kind, known.round) == (new.run, new.kind, new.round)
        if not is_same_request and (known.kind, known.model) != (new.kind, new.model):
            continue
        where = f"for {'this request' if is_same_request else f'the same model in run {known.run}'}"
        if known.shares.keys() != new.shares.keys() or new.survivors not in ([], known.survivors):
            other = ", ".join(sorted(set(known.survivors) ^ set(new.survivors or new.shares))) or "no site"
            return (
                f"{where}, this site has helped to reveal the sum over {', '.join(known.survivors)}; the new one "
                f"differs by {other}, whose values two sums could isolate"
            )
        if known.answer == new.answer and known.shares != new.shares:
            return f"{where}, this site has helped to reveal a sum of the same answer that weighed the sites otherwise"
    return ""
