"""Partition of one data set into simulated sites: disjoint and reproducible from the seed.

Folders of a data set whose sites are its folders, and those that hold no data.
"""

import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from ...core.errors import DataError
from ...core.names import clean_name, describe_absent, describe_unknown, format_names, parse_numbers
from ...core.settings import Settings
from ..task import Cohort

Partition = dict[str, tuple[str, ...]]
"""Identifiers of each site's examples."""
Sizes = Literal["uniform", "skewed"]

SKEW = 0.7
"""Ratio of one site's size to the one before it when sizes are skewed."""
RESERVED = ("server", "simulator_server")
"""Names that FLARE gives to its own server."""
_LETTERS = str.maketrans(
    {"ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O"}
    | {"ł": "l", "Ł": "L", "đ": "d", "Đ": "D"}
)
"""Latin letters that Unicode does not decompose into a letter and an accent."""


Parts = list[tuple[str, Any]]
"""Name of each site with the positions of its examples."""


class Partitioner(Settings, ABC):
    """How a data set is partitioned into simulated sites."""

    @abstractmethod
    def deal(self, cohort: Cohort, sites: Any) -> Parts:
        """Return the sites and the positions of their examples.

        Args:
            cohort: the examples.
            sites: number of sites.
        """

    def divide(self, cohort: Cohort, sites: Any = None) -> Partition:
        """Return the identifiers of the examples of each site, under its FLARE name and in the order of the cohort.

        Args:
            cohort: the examples.
            sites: number of sites; None: those that the data names.

        Raises:
            DataError: the examples cannot be divided so, or two sites would have one name.
        """
        owners: dict[str, str] = {}
        partition: Partition = {}
        for name, rows in self.deal(cohort, sites):
            flare_name = format_site_name(name)
            if flare_name in owners:
                raise DataError(
                    f"sites {owners[flare_name]!r}, {name!r} would all be named {flare_name!r}, because FLARE accepts "
                    "only the letters A to Z, digits, - and _; rename one of them in the data"
                )
            owners[flare_name], partition[flare_name] = name, tuple(cohort.ids[row] for row in sorted(rows))
        return dict(sorted(partition.items()))


class NaturalPartition(Partitioner):
    """Use the sites that the data names; optionally split some of them further at random."""

    column: str = "site"
    """column that names the site of an example"""
    missing: str | None = None
    """site of the examples whose column is empty, such as unknown; null: they are an error"""
    split: dict[str, int] = Field(default_factory=dict)
    """split a site at random into this many parts: {IXI-HH: 4}"""
    seed: int = Field(0, ge=0)
    """seed of the random split"""

    def deal(self, cohort: Cohort, sites: int | None) -> Parts:
        """Return the sites that the data names, the largest first.

        Raises:
            DataError: there is no such column or site, an example has no site, or there are fewer sites than requested.
        """
        labels = _get_labels(cohort, self.column, self.missing)
        members = {str(name): np.flatnonzero(labels == name) for name in np.unique(labels)}
        parts: Parts = []
        for name in [*members, *(set(self.split) - set(members))]:
            if name not in members:
                raise DataError(f"split: {describe_unknown(name, members, f'column {self.column!r}')}")
            rows, pieces = members[name], self.split.get(name, 1)
            if pieces > 1:
                rows = np.random.default_rng([self.seed, len(parts)]).permutation(rows)
            named = [f"{name}-{i}" for i in range(1, pieces + 1)] if pieces > 1 else [name]
            parts += zip(named, _cut(rows, pieces), strict=True)
        if sites is not None and sites > len(parts):
            raise DataError(f"{sites} sites were requested, but column {self.column!r} has {len(parts)}; request fewer")
        return sorted(parts, key=lambda part: -len(part[1]))[:sites]


class IidPartition(Partitioner):
    """Give every site a random sample of the whole population (the IID setting of FedSparsify)."""

    sizes: Sizes = "uniform"
    """equal or geometrically decreasing sizes"""
    seed: int = Field(0, ge=0)
    """seed of the shuffle"""

    def deal(self, cohort: Cohort, sites: int) -> Parts:
        """Return numbered sites.

        Raises:
            DataError: there are fewer examples than sites.
        """
        order = np.random.default_rng(self.seed).permutation(len(cohort.ids))
        return _number(_cut(order, sites, self.sizes))


class AgePartition(Partitioner):
    """Give every site its own range of a column (FedSparsify's non-IID setting, by age); ties keep their order."""

    column: str = "age"
    """numeric column to sort by"""
    sizes: Sizes = "uniform"
    """equal or geometrically decreasing sizes"""

    def deal(self, cohort: Cohort, sites: int) -> Parts:
        """Return numbered sites.

        Raises:
            DataError: there is no such numeric column, or there are fewer examples than sites.
        """
        try:
            values = parse_numbers(_get_column(cohort, self.column))
        except ValueError as error:
            raise DataError(f"column {self.column!r}: {error}; sorting by range needs numbers") from error
        return _number(_cut(np.argsort(values, kind="stable"), sites, self.sizes))


class DirichletPartition(Partitioner):
    """Give sites equal sizes and class proportions drawn from Dir(alpha) (NeuroSFL, section 4.2).

    Examples are assigned one at a time to a random site that is not full. The class is drawn from the site's
    proportions over the classes not yet used up; if these proportions are all zero, it is drawn from the remaining
    examples. The procedure therefore terminates even for one-hot proportions.
    """

    column: str = "label"
    """column of the classes"""
    alpha: float = Field(0.5, gt=0)
    """concentration; a small value gives each site few classes"""
    min_examples: int = Field(5, ge=1)
    """fewest examples per site"""
    seed: int = Field(0, ge=0)
    """seed of the draws"""

    def deal(self, cohort: Cohort, sites: int) -> Parts:
        """Return numbered sites.

        Raises:
            DataError: there is no such column, or there are fewer than ``min_examples`` examples per site.
        """
        if len(cohort.ids) < self.min_examples * sites:
            raise DataError(
                f"{len(cohort.ids)} examples are too few for {sites} sites with {self.min_examples} each; request "
                "fewer sites"
            )
        rng = np.random.default_rng(self.seed)
        classes, labels = np.unique(_get_labels(cohort, self.column), return_inverse=True)
        pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(len(classes))]
        remaining = np.array([len(pool) for pool in pools], dtype=np.float64)
        # A tiny alpha underflows to 0/0: NaN becomes 0, and the draw below falls back to the remaining examples.
        proportions = np.nan_to_num(rng.dirichlet(np.full(len(classes), self.alpha), size=sites))
        turns = rng.permutation(np.repeat(np.arange(sites), compute_sizes(len(labels), sites)))
        parts: list[list[int]] = [[] for _ in range(sites)]
        for site, u in zip(turns, rng.random(len(turns)), strict=True):
            mass = np.where(remaining > 0, proportions[site], 0.0)
            cumulative = np.cumsum(mass if mass.sum() > 0 else remaining)
            drawn_class = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
            remaining[drawn_class] -= 1
            parts[site].append(pools[drawn_class].pop())
        return _number(parts)


class FewClassesPartition(Partitioner):
    """Give every site examples of a few classes only, and sites different sizes (MetaGater, section 5.1).

    Sizes are drawn log-uniformly within the limits. In decreasing order of size, each site takes equal parts of the
    classes with the most remaining examples. Examples that no site takes are dropped.
    """

    column: str = "label"
    """column of the classes"""
    classes: int = Field(2, ge=1)
    """number of classes per site"""
    min_examples: int = Field(30, ge=1)
    """fewest examples per site"""
    max_examples: int = Field(100, ge=1)
    """most examples per site; sizes are drawn log-uniformly"""
    seed: int = Field(0, ge=0)
    """seed of the draws"""

    def deal(self, cohort: Cohort, sites: int) -> Parts:
        """Return numbered sites.

        Raises:
            DataError: there is no such column, there are too few classes or examples, or the limits are reversed.
        """
        rng = np.random.default_rng(self.seed)
        names, labels = np.unique(_get_labels(cohort, self.column), return_inverse=True)
        if not self.classes <= self.min_examples <= self.max_examples or self.classes > len(names):
            raise DataError(
                f"{self.classes} of {len(names)} classes with {self.min_examples} to {self.max_examples} examples per "
                "site is impossible; set classes <= min_examples <= max_examples, and at most as many classes as the "
                "data has"
            )
        sizes = np.exp(rng.uniform(np.log(self.min_examples), np.log(self.max_examples + 1), sites)).astype(int)
        sizes = sizes.clip(self.min_examples, self.max_examples)
        pools = [rng.permutation(np.flatnonzero(labels == c)).tolist() for c in range(len(names))]
        parts: dict[int, list[int]] = {}
        for site in np.argsort(-sizes, kind="stable"):
            tie_breaks = rng.random(len(pools))
            fullest = sorted(range(len(pools)), key=lambda c: (-len(pools[c]), tie_breaks[c]))[: self.classes]
            counts = compute_sizes(int(sizes[site]), self.classes)
            if any(len(pools[c]) < count for c, count in zip(fullest, counts, strict=True)):
                raise DataError(
                    f"{len(labels)} examples are too few for {sites} sites of {self.min_examples} to "
                    f"{self.max_examples}; request fewer or smaller sites"
                )
            parts[int(site)] = [pools[c].pop() for c, count in zip(fullest, counts, strict=True) for _ in range(count)]
        return _number([parts[site] for site in range(sites)])


class SharedPartition(Settings):
    """Give every site the location of the whole data set; a training script divides it."""


PARTITIONS: dict[str, type[Settings]] = {
    "natural": NaturalPartition,
    "iid": IidPartition,
    "age": AgePartition,
    "dirichlet": DirichletPartition,
    "few_classes": FewClassesPartition,
    "shared": SharedPartition,
}
"""Partitions by the setting ``kind``."""


def partition_cohort(partition: Partitioner, cohort: Cohort, sites: int | None) -> Partition:
    """Return a partition in which all examples of a subject are at one site, that of its first example.

    Where the data names the sites and none of them is split, a subject may have been at several.
    """
    if not cohort.subjects or (isinstance(partition, NaturalPartition) and not partition.split):
        return partition.divide(cohort, sites)
    first = {subject: row for row, subject in reversed(list(enumerate(cohort.subjects)))}
    rows = sorted(first.values())
    columns = {name: np.asarray(values)[rows] for name, values in cohort.columns.items()}
    parts = partition.divide(Cohort(tuple(cohort.subjects[row] for row in rows), columns), sites)
    site_of = {subject: site for site, subjects in parts.items() for subject in subjects}
    owners = list(zip(cohort.ids, cohort.subjects, strict=True))
    return {site: tuple(name for name, subject in owners if site_of.get(subject) == site) for site in parts}


def compute_sizes(total: int, sites: int, sizes: Sizes = "uniform") -> list[int]:
    """Return the number of examples of each site: at least one, never increasing, summing to ``total``.

    Uniform sizes differ by at most one. Skewed sizes follow a geometric sequence of ratio ``SKEW``; FedSparsify
    describes its sizes as "rightly skewed" without giving numbers.

    >>> compute_sizes(10, 4), compute_sizes(100, 4, "skewed")
    ([3, 3, 2, 2], [39, 27, 20, 14])

    Raises:
        DataError: there are fewer examples than sites.
    """
    if total < sites:
        raise DataError(f"{total} examples cannot fill {sites} sites; request fewer sites")
    weights = np.array([SKEW**i if sizes == "skewed" else 1.0 for i in range(sites)])
    # One example per site is set aside first, so that rounding cannot leave a site empty; the fractional remainders
    # then go to the sites with the largest ones.
    exact = weights / weights.sum() * (total - sites)
    counts = 1 + np.floor(exact).astype(int)
    largest_remainders = np.argsort(np.floor(exact) - exact, kind="stable")[: total - int(counts.sum())]
    counts[largest_remainders] += 1
    return sorted(counts.tolist(), reverse=True)


def _cut(order: np.ndarray, sites: int, sizes: Sizes = "uniform") -> list[np.ndarray]:
    """Cut examples in ``order`` into consecutive sites."""
    return np.split(order, np.cumsum(compute_sizes(len(order), sites, sizes))[:-1])


def _number(parts: Sequence[Any]) -> Parts:
    return [(f"site-{number}", rows) for number, rows in enumerate(parts, start=1)]


def format_site_name(name: str) -> str:
    """Return a site name that FLARE accepts: letters A to Z, digits, ``-`` and ``_``; accents are dropped.

    >>> format_site_name("Hôpital Saint-Étienne"), format_site_name("server")
    ('Hopital-Saint-Etienne', 'site-server')

    Raises:
        DataError: a letter of the name has no Latin counterpart.
    """
    decomposed = unicodedata.normalize("NFKD", name.translate(_LETTERS))
    plain = "".join(character for character in decomposed if not unicodedata.combining(character))
    # Without the letters of another script, a name would be unrecognisable or empty.
    if foreign := [character for character in plain if character.isalnum() and not character.isascii()]:
        raise DataError(
            f"site {name!r}: {foreign[0]!r} cannot be written with the letters A to Z, and FLARE accepts no others in "
            "a site's name; write the name in Latin letters in the data"
        )
    safe = re.sub(r"[^A-Za-z0-9_-]+", "-", plain).strip("-")
    if not safe:
        raise DataError(f"site {name!r} has no letter or digit; FLARE needs a name of letters, digits, - and _")
    return f"site-{safe}" if safe.lower() in RESERVED else safe


def find_renamed_sites(cohort: Cohort, column: str = "site", missing: str | None = None) -> dict[str, str]:
    """Return the sites of a column whose FLARE name differs from the one in the data: FLARE name by name.

    Raises:
        DataError: there is no such column, or a row has no value in it.
    """
    names = {str(name): format_site_name(str(name)) for name in np.unique(_get_labels(cohort, column, missing))}
    return {name: flare_name for name, flare_name in names.items() if name != flare_name}


def _get_column(cohort: Cohort, column: str) -> np.ndarray:
    column = clean_name(column)
    if column not in cohort.columns:
        raise DataError(f"{describe_absent(column, cohort.columns)}. Set simulator.data.partition.column")
    return np.asarray(cohort.columns[column])


def _get_labels(cohort: Cohort, column: str, missing_label: str | None = None) -> np.ndarray:
    """Return a column as names; an example without one has ``missing_label``, where that is given."""
    try:
        labels = format_names(_get_column(cohort, column))
    except ValueError as error:
        raise DataError(f"column {column!r}: {error}") from error
    if missing_label is not None:
        return np.array([label or missing_label for label in labels])
    if missing := labels.count(""):
        raise DataError(
            f"column {column!r} has no value for {missing} of {len(labels)} examples (first: "
            f"{cohort.ids[labels.index('')]}); fill it in"
        )
    return np.array(labels)


_NO_SITES = frozenset({"code", "derivatives", "docs", "logs", "lost+found", "phenotype", "sourcedata", "stimuli"})
"""Folders beside sites that hold no data of subjects: those of BIDS, and of file systems."""


def list_folders_without_examples(path: Path, cohort: Cohort) -> list[str]:
    """Return the folders of a data set of several sites that no example is from, in name order.

    Args:
        path: folder of the data.
        cohort: its examples; of several sites, their identifiers are ``FOLDER/NAME``. With other identifiers, the
            folders are no sites.
    """
    sites = {name.partition("/")[0] for name in cohort.ids}
    if not path.is_dir() or not all("/" in name for name in cohort.ids):
        return []
    folders = {folder.name for folder in path.glob("*/") if not folder.name.startswith((".", "_"))}
    # Identifiers of a user task may have a slash of their own.
    return sorted(folders - sites - _NO_SITES) if sites <= folders else []
