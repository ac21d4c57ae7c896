"""Cutting one data set into sites, for the simulator: disjoint, complete, and the same for the same seed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np

from ..errors import DataError, suggest
from ..task import Cohort

Partition = dict[str, tuple[str, ...]]
"""Identifiers of each site's examples."""
Sizes = Literal["uniform", "skewed"]

SKEW = 0.7
"""Ratio of one site's size to the one before it when sizes are skewed."""
RESERVED = ("server", "simulator_server")
"""Names that the framework gives to its own end."""


def natural(
    cohort: Cohort,
    sites: int | None = None,
    *,
    column: str = "site",
    split: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Partition:
    """The sites that the data names; some may be cut further, at random.

    Args:
        cohort: the examples.
        sites: keep the largest ones only; None: all.
        column: names the site of each example.
        split: parts of a site, such as ``{"IXI-HH": 4}``, which become ``IXI-HH-1`` to ``IXI-HH-4``.
        seed: of the cut.

    Raises:
        DataError: no such column or site, an example without one, fewer sites than wanted, or two of one name.
    """
    labels = _labels(cohort, column)
    found = {str(name): np.flatnonzero(labels == name) for name in np.unique(labels)}
    parts: list[tuple[str, np.ndarray]] = []
    for name in [*found, *(set(split or {}) - set(found))]:
        if name not in found:
            raise DataError(f"split: there is no site {name!r} in column {column!r}.{suggest(name, found)}")
        pieces = (split or {}).get(name, 1)
        order = np.random.default_rng([seed, len(parts)]).permutation(found[name]) if pieces > 1 else found[name]
        cut = np.split(order, np.cumsum(shares(len(order), pieces))[:-1])
        parts += [(f"{name}-{i}" if pieces > 1 else name, np.sort(part)) for i, part in enumerate(cut, start=1)]
    if sites is not None and sites > len(parts):
        raise DataError(f"{sites} sites are wanted, column {column!r} has {len(parts)}; ask for fewer")
    largest = sorted(parts, key=lambda part: -len(part[1]))[:sites]
    return _named(cohort, [name for name, _ in largest], [part for _, part in largest])


def iid(cohort: Cohort, sites: int, *, sizes: Sizes = "uniform", seed: int = 0) -> Partition:
    """Every site covers the whole population (FedSparsify's IID).

    Args:
        cohort: the examples.
        sites: number of sites, ``site-1`` the largest.
        sizes: see :func:`shares`.
        seed: of the shuffle.

    Raises:
        DataError: there are fewer examples than sites.
    """
    return _cut(cohort, np.random.default_rng(seed).permutation(len(cohort.ids)), sites, sizes)


def by_range(cohort: Cohort, sites: int, *, column: str = "age", sizes: Sizes = "uniform") -> Partition:
    """Sorted by a column and cut: every site holds its own range (FedSparsify's non-IID by age; ties stay in order).

    Raises:
        DataError: there is no such column of numbers, or there are fewer examples than sites.
    """
    values = _column(cohort, column)
    if values.dtype.kind not in "fiu":
        raise DataError(f"column {column!r} holds text such as {str(values[0])!r}; sorting by range needs numbers")
    return _cut(cohort, np.argsort(values, kind="stable"), sites, sizes)


def dirichlet(
    cohort: Cohort, sites: int, *, column: str = "label", alpha: float = 0.5, seed: int = 0, at_least: int = 5
) -> Partition:
    """Balanced sizes, class proportions of each site drawn from Dir(alpha) (NeuroSFL section 4.2).

    One example at a time goes to a random site that is not full, of a class drawn from the site's proportions among
    the classes that are left; where the site wants none of these, of a class drawn by what is left. So it always ends,
    also when the proportions are one-hot.

    Args:
        cohort: the examples.
        sites: number of sites.
        column: the classes.
        alpha: concentration; small: each site holds few classes.
        seed: of all draws.
        at_least: fewest examples of a site.

    Raises:
        DataError: there is no such column, or there are fewer than ``at_least`` examples for each site.
    """
    if len(cohort.ids) < at_least * sites:
        raise DataError(f"{len(cohort.ids)} examples cannot give {sites} sites {at_least} each; ask for fewer sites")
    rng = np.random.default_rng(seed)
    classes, labels = np.unique(_labels(cohort, column), return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(len(classes))]
    left = np.array([len(pool) for pool in pools], dtype=np.float64)
    wanted = np.nan_to_num(rng.dirichlet(np.full(len(classes), alpha), size=sites))
    turns = rng.permutation(np.repeat(np.arange(sites), shares(len(labels), sites)))
    parts: list[list[int]] = [[] for _ in range(sites)]
    for site, u in zip(turns, rng.random(len(turns)), strict=True):
        mass = np.where(left > 0, wanted[site], 0.0)
        steps = np.cumsum(mass if mass.sum() > 0 else left)
        chosen = int(np.searchsorted(steps, u * steps[-1], side="right"))
        left[chosen] -= 1
        parts[site].append(pools[chosen].pop())
    return _named(cohort, _numbered(sites), [np.sort(part) for part in parts])


def few_classes(
    cohort: Cohort,
    sites: int,
    *,
    column: str = "label",
    classes: int = 2,
    smallest: int = 30,
    largest: int = 100,
    seed: int = 0,
) -> Partition:
    """Every site holds examples of a few classes only, and sites differ in size (MetaGater section 5.1).

    Sizes are drawn log-uniformly within the limits, largest first; each site gets the classes of which most is left,
    in equal parts. Examples beyond what the sites take are left out.

    Args:
        cohort: the examples.
        sites: number of sites.
        column: the classes.
        classes: how many of them a site holds.
        smallest: fewest examples of a site.
        largest: most examples of a site.
        seed: of all draws.

    Raises:
        DataError: no such column, too few classes or examples, or the limits are the wrong way round.
    """
    rng = np.random.default_rng(seed)
    names, labels = np.unique(_labels(cohort, column), return_inverse=True)
    if not classes <= smallest <= largest or classes > len(names):
        raise DataError(
            f"{classes} of {len(names)} classes and {smallest} to {largest} examples a site cannot be; give classes <= "
            "smallest <= largest, and no more classes than there are"
        )
    drawn = np.exp(rng.uniform(np.log(smallest), np.log(largest + 1), sites)).astype(int).clip(smallest, largest)
    pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(len(names))]
    parts: dict[int, np.ndarray] = {}
    for site in np.argsort(-drawn, kind="stable"):
        tie = rng.random(len(pools))
        fullest = sorted(range(len(pools)), key=lambda c: (-len(pools[c]), tie[c]))[:classes]
        wanted = shares(int(drawn[site]), classes)
        if any(len(pools[c]) < count for c, count in zip(fullest, wanted, strict=True)):
            raise DataError(
                f"{len(labels)} examples are too few for {sites} sites of {smallest} to {largest}; ask for fewer or smaller"
            )
        taken = [pools[c].pop() for c, count in zip(fullest, wanted, strict=True) for _ in range(count)]
        parts[int(site)] = np.sort(np.array(taken))
    return _named(cohort, _numbered(sites), [parts[site] for site in range(sites)])


PARTITIONERS: dict[str, Callable[..., Partition]] = {
    "natural": natural,
    "iid": iid,
    "age": by_range,
    "dirichlet": dirichlet,
    "few_classes": few_classes,
}
"""By kind; each takes the cohort, the number of sites, and its own settings."""


def shares(total: int, sites: int, sizes: Sizes = "uniform") -> list[int]:
    """Number of examples of each site, at least one, adding up to ``total``, never increasing.

    Uniform sizes differ by one at most. Skewed sizes follow a geometric sequence of ratio ``SKEW``: the paper says
    "rightly skewed" and no numbers.

    >>> shares(10, 4), shares(100, 4, "skewed")
    ([3, 3, 2, 2], [39, 27, 20, 14])

    Raises:
        DataError: there are fewer examples than sites.
    """
    if total < sites:
        raise DataError(f"{total} examples cannot fill {sites} sites; ask for fewer sites")
    weights = np.array([SKEW**i if sizes == "skewed" else 1.0 for i in range(sites)])
    exact = weights / weights.sum() * (total - sites)
    counts = 1 + np.floor(exact).astype(int)
    rest = np.argsort(np.floor(exact) - exact, kind="stable")[: total - int(counts.sum())]
    counts[rest] += 1
    return sorted(counts.tolist(), reverse=True)


def _cut(cohort: Cohort, order: np.ndarray, sites: int, sizes: Sizes) -> Partition:
    ends = np.cumsum(shares(len(order), sites, sizes))[:-1]
    return _named(cohort, _numbered(sites), [np.sort(part) for part in np.split(order, ends)])


def _numbered(sites: int) -> list[str]:
    return [f"site-{i}" for i in range(1, sites + 1)]


def _named(cohort: Cohort, names: Sequence[str], parts: Sequence[np.ndarray]) -> Partition:
    safe = [_safe(name) for name in names]
    if twice := [name for i, name in enumerate(names) if safe[i] in safe[:i]]:
        raise DataError(f"site {twice[0]!r} has the same name as another once only letters, digits, - and _ are kept")
    return {name: tuple(cohort.ids[i] for i in part) for name, part in sorted(zip(safe, parts, strict=True))}


def _safe(name: str) -> str:
    """A site's name as the framework takes it: letters, digits, ``-`` and ``_``."""
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")
    return f"site-{safe}" if not safe or safe.lower() in RESERVED else safe


def _column(cohort: Cohort, column: str) -> np.ndarray:
    if column not in cohort.columns:
        raise DataError(f"no column {column!r} to partition by.{suggest(column, cohort.columns)}")
    return cohort.columns[column]


def _labels(cohort: Cohort, column: str) -> np.ndarray:
    """A column as text; every example must have a value."""
    values = _column(cohort, column)
    labels = np.array([f"{v:g}" if isinstance(v, float) else str(v) for v in values.tolist()])
    if missing := int(np.count_nonzero(np.isin(labels, ["", "nan", "n/a"]))):
        raise DataError(f"column {column!r} has no value for {missing} of {len(labels)} examples; fill it in")
    return labels
