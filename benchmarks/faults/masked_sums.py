"""Search for combinations of masked sums that isolate fewer sites than the minimum, against a server that deviates.

The sites follow the package's rule (``flare_sparse.privacy.secure_aggregation.limits``, not a copy). The server chooses
members, which of them reveal shares, another list of survivors for each of them, and one of two things: in one job, a
model that differs in the last bit; or two jobs of one model, of which one weighs by examples. It has no accomplice. A
site's answers to one request, whatever its model, and those to one model, in whatever job, count as the same vector.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from itertools import combinations, count, product
from math import comb
from operator import or_

from flare_sparse.privacy.secure_aggregation.limits import compute_threshold, count_needed, find_violation
from flare_sparse.wire.stage import RevealedSum

PRIME = 2**61 - 1
"""Larger than every minor of six of these rows, so that ranks modulo this prime are those over the rationals."""
EXAMPLES = (7, 2, 5, 2, 11, 2, 3, 13, 2, 17, 5, 19)
"""Number of examples of each site; some are equal."""
CHOICES = {"attempts": ((0, 0, False), (0, 1, False)), "jobs": ((0, 0, False), (1, 0, False), (1, 0, True))}
"""Job, variant of the model and weighting that the server may choose for an attempt."""
Lists = dict[int, frozenset[int]]
"""Survivors that each site that reveals shares has been told."""
Row = tuple[int, ...]
"""Factor of each site in a sum that the server has read."""
Record = tuple[int, int, int, bool, tuple[int, ...], frozenset[int]]
"""A site, and what the sum that it records depends on: job, variant, weighting, members and survivors."""


@dataclass(frozen=True)
class Rules:
    """What decides whether a site reveals shares; the default is the package's."""

    find_violation: Callable[[Iterable[RevealedSum], RevealedSum], str] = find_violation
    count_needed: Callable[[int, int], int] = count_needed
    compute_threshold: Callable[[int, int], int] = compute_threshold


@dataclass(frozen=True, eq=False)
class Ask:
    """One sum that the server tries to read.

    Attributes:
        job: number of the job; the jobs have equal first models.
        variant: number of the model that it sends in this job's request; 0 is the one that the jobs share.
        by_examples: whether the job weighs by examples.
        members: sites of the sum.
        lists: survivors that each site is told from which it asks shares.
    """

    job: int
    variant: int
    by_examples: bool
    members: tuple[int, ...]
    lists: Lists

    @cached_property
    def sums(self) -> dict[int, RevealedSum]:
        """What each site that is asked for shares would record."""
        return {site: self._build_sum(site) for site in self.lists}

    def _build_sum(self, site: int) -> RevealedSum:
        total = sum(self.weigh(member) for member in self.members)
        return RevealedSum(
            run=f"{self.job:016x}",
            kind="train",
            round=1,
            model=f"shared {self.variant}" if not self.variant else f"job {self.job}, {self.variant}",
            answer=f"{site}, {self.variant}",
            shares={str(member): self.weigh(member) / total for member in self.members},
            survivors=sorted(map(str, self.lists[site])),
        )

    @cached_property
    def records(self) -> list[Record]:
        """What these sums depend on, each with its site."""
        return [
            (site, self.job, self.variant, self.by_examples, self.members, told) for site, told in self.lists.items()
        ]

    def build_row(self, opened: Collection[int], sites: int) -> Row:
        """Return the factor of each of ``sites`` sites in the sum over those that are opened."""
        return tuple(self.weigh(site) if site in opened else 0 for site in range(sites))

    def weigh(self, site: int) -> int:
        """Return the factor of a site in the sum."""
        return EXAMPLES[site] if self.by_examples else 1


def read_sum(members: Sequence[int], lists: Lists, threshold: int) -> frozenset[int] | None:
    """Return the sites whose values are in the sum that the shares open; None if some pads remain.

    A seed opens with ``threshold`` sites that take its site for a survivor, a key of pads with as many that do not.
    """
    says = {member: sum(member in told for told in lists.values()) for member in members}
    if any(max(yes, len(lists) - yes) < threshold for yes in says.values()):
        return None
    return frozenset(member for member, yes in says.items() if yes >= threshold)


def compute_rank(rows: Sequence[Sequence[int]]) -> int:
    """Return the rank over the rationals."""
    left, rank = [list(row) for row in rows], 0
    for column in range(len(left[0]) if left else 0):
        pivot = next((row for row in left[rank:] if row[column] % PRIME), None)
        if pivot is None:
            continue
        left.remove(pivot)
        left.insert(rank, pivot)
        inverse = pow(pivot[column], -1, PRIME)
        for row in left[rank + 1 :]:
            factor = row[column] * inverse % PRIME
            row[:] = [(value - factor * own) % PRIME for value, own in zip(row, pivot, strict=True)]
        rank += 1
    return rank


def find_isolated(rows: Sequence[Sequence[int]], min_sites: int) -> tuple[int, ...]:
    """Return sites, fewer than the minimum, to which some combination of the sums is confined; empty without any."""
    rank, sites = compute_rank(rows), len(rows[0])
    # A combination that is confined to some sites is one that vanishes at all others: it lowers the rank of these.
    for group in combinations(range(sites), min_sites - 1):
        if compute_rank([[value for site, value in enumerate(row) if site not in group] for row in rows]) < rank:
            return group
    return ()


@dataclass
class Federation:
    """The sites' records, and what the server has read."""

    sites: int
    min_sites: int
    rules: Rules = Rules()
    records: dict[int, list[RevealedSum]] = field(default_factory=lambda: defaultdict(list))
    rows: list[tuple[int, ...]] = field(default_factory=list)

    def ask(self, ask: Ask) -> bool:
        """Ask for shares, which the sites give as their rule says; return whether the server reads a new sum."""
        needed = self.rules.count_needed(len(ask.members), self.min_sites)
        given: Lists = {}
        for site, told in ask.lists.items():
            new = ask.sums[site]
            if site in told and len(told) >= needed and not self.rules.find_violation(self.records[site], new):
                given[site] = told
                if new not in self.records[site]:
                    self.records[site].append(new)
        opened = read_sum(ask.members, given, self.rules.compute_threshold(len(ask.members), self.min_sites))
        if not opened or (row := ask.build_row(opened, self.sites)) in self.rows:
            return False
        self.rows.append(row)
        return True


def iterate_lies(members: Sequence[int], min_sites: int, rules: Rules) -> Iterator[Lists]:
    """Yield every choice of sites and of the survivors that each is told, which may differ."""
    options: list[list[frozenset[int] | None]] = []
    for site in members:
        others = [other for other in members if other != site]
        sizes = range(rules.count_needed(len(members), min_sites) - 1, len(members))
        options.append([None, *(frozenset((site, *rest)) for size in sizes for rest in combinations(others, size))])
    for choice in product(*options):
        yield {site: told for site, told in zip(members, choice, strict=True) if told is not None}


def iterate_asks(
    sites: int, min_sites: int, choices: str, rules: Rules, counts: Counter[str]
) -> Iterator[tuple[Ask, Row]]:
    """Yield every attempt that opens a sum if no site refuses, and the sum; ``counts`` has how many were tried."""
    for size in range(min_sites, sites + 1):
        threshold = rules.compute_threshold(size, min_sites)
        for members in combinations(range(sites), size):
            for lists in iterate_lies(members, min_sites, rules):
                counts["attempts"] += len(CHOICES[choices])
                if opened := read_sum(members, lists, threshold):
                    for choice in CHOICES[choices]:
                        ask = Ask(*choice, members, lists)
                        yield ask, ask.build_row(opened, sites)


def is_first_alike(members: Collection[int], sites: int, *, by_examples: bool) -> bool:
    """Return whether, of all members that relabelling sites of equal weight makes of these, these come first."""
    alike: dict[int, list[bool]] = defaultdict(list)
    for site in range(sites):
        alike[EXAMPLES[site] if by_examples else 1].append(site in members)
    return all(chosen == sorted(chosen, reverse=True) for chosen in alike.values())


def search_all(sites: int, min_sites: int, choices: str, rules: Rules, counts: Counter[str]) -> list[Ask]:
    """Return attempts after which few sites are isolated, of all sequences of any length; empty if there are none.

    A site refuses by its own record alone, and no less with a longer one: attempts that a site refuses, or whose sum
    has been read, help the server in nothing, and the order of the others does not matter.
    """
    asks, rows = zip(*iterate_asks(sites, min_sites, choices, rules, counts), strict=True)
    # A set of attempts is a number: bit i is attempt i.
    leaving: dict[Record, int] = defaultdict(int)
    reading: dict[Row, int] = defaultdict(int)
    sums: dict[Record, RevealedSum] = {}
    firsts = 0
    weighs = any(by_examples for _, _, by_examples in CHOICES[choices])
    for number, (ask, row) in enumerate(zip(asks, rows, strict=True)):
        reading[row] |= 1 << number
        firsts |= is_first_alike(ask.members, sites, by_examples=weighs) << number
        for record in ask.records:
            leaving[record] |= 1 << number
            sums.setdefault(record, ask.sums[record[0]])

    @cache
    def find_refused(site: int, known: frozenset[Record]) -> int:
        """Return the attempts that a site with these records refuses."""
        earlier = [sums[record] for record in known]
        return join(
            bits for new, bits in leaving.items() if new[0] == site and rules.find_violation(earlier, sums[new])
        )

    find_few = cache(lambda read: find_isolated(sorted(read), min_sites))
    visited: set[tuple[frozenset[Record], frozenset[Row]]] = set()

    def extend(known: frozenset[Record], read: frozenset[Row], left: int) -> list[Ask]:
        while left:
            number = left.bit_length() - 1
            left ^= 1 << number
            state = known.union(asks[number].records), read | {rows[number]}
            if state in visited:
                continue
            visited.add(state)
            counts["sequences"] += 1
            counts["combinations"] += comb(sites, min_sites - 1)
            if find_few(state[1]):
                counts["isolated"] += 1
                return [asks[number]]
            refused = join(reading[row] for row in state[1]) | join(
                find_refused(site, frozenset(record for record in state[0] if record[0] == site))
                for site in range(sites)
            )
            if found := extend(*state, ((1 << len(asks)) - 1) & ~refused):
                return [asks[number], *found]
        return []

    def join(sets: Iterable[int]) -> int:
        return reduce(or_, sets, 0)

    return extend(frozenset(), frozenset(), firsts)


def draw_ask(generator: random.Random, federation: Federation, choices: str) -> Ask:
    """Return an attempt of a server that prefers sites that have revealed little, and tells some of them lies."""
    members = tuple(sorted(generator.sample(range(federation.sites), generator.randint(3, federation.sites))))
    needed = federation.rules.count_needed(len(members), federation.min_sites)
    threshold = federation.rules.compute_threshold(len(members), federation.min_sites)
    survivors = generator.sample(members, generator.randint(min(needed, len(members)), len(members)))
    fresh = sorted(survivors, key=lambda site: (len(federation.records[site]), generator.random()))
    asked = fresh[: generator.randint(min(threshold, len(fresh)), len(fresh))]
    lists = {site: frozenset(survivors) for site in asked}
    liars = generator.randint(0, 6 * len(members)) if generator.random() < 0.5 else 0
    for _ in range(liars):
        # A site that is asked, or a further one, is told that another one has not survived, or has.
        site, other = generator.choice(members), generator.choice(members)
        told = lists.get(site, frozenset((*survivors, site))) ^ ({other} - {site})
        changed = {**lists, site: told}
        if len(told) >= needed and read_sum(members, changed, threshold):
            lists = changed
    return Ask(*generator.choice(CHOICES[choices]), members, lists)


def search_at_random(
    sites: int, min_sites: int, tries: int, rules: Rules, seed: int, counts: Counter[str]
) -> list[tuple[int, ...]]:
    """Return sums that isolate few sites, of ``tries`` runs of some dozen attempts each; empty if there are none."""
    generator = random.Random(seed)
    for number in range(tries):
        choices = list(CHOICES)[number % len(CHOICES)]
        federation = Federation(sites, min_sites, rules)
        for _ in range(4 * sites):
            counts["attempts"] += 1
            if federation.ask(draw_ask(generator, federation, choices)):
                counts["sequences"] += 1
                counts["combinations"] += comb(sites, min_sites - 1)
                if find_isolated(federation.rows, min_sites):
                    counts["isolated"] += 1
                    return federation.rows
    return []


def main() -> None:
    """Search all attempts of up to six sites, then at random with up to twelve for some minutes."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="time of the random search")
    minutes = parser.parse_args().minutes
    print("| search | sites | minimum | attempts | sequences | combinations | isolated |")
    print("| --- | --- | --- | --- | --- | --- | --- |")

    def show(name: str, sites: int, min_sites: int, counts: Counter[str]) -> None:
        cells = (f"{counts[key]:,}" for key in ("attempts", "sequences", "combinations", "isolated"))
        print(f"| {name} | {sites} | {min_sites} | {' | '.join(cells)} |", flush=True)

    for sites in range(3, 7):
        for min_sites in range(3, sites + 1):
            for choices in CHOICES:
                counts: Counter[str] = Counter()
                search_all(sites, min_sites, choices, Rules(), counts)
                show(f"all, {choices}", sites, min_sites, counts)
    sizes = [(sites, min_sites) for sites in range(5, 13) for min_sites in range(3, min(sites, 8) + 1)]
    for sites, min_sites in sizes:
        counts, end = Counter(), time.monotonic() + 60 * minutes / len(sizes)
        for seed in count():
            if time.monotonic() > end or search_at_random(sites, min_sites, 10, Rules(), seed, counts):
                break
        show("random", sites, min_sites, counts)


if __name__ == "__main__":
    main()
