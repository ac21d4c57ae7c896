"""What ``release: cells`` costs an honest study: columns that can be declared, weights, metrics, and withdrawals.

Run as ``python benchmarks/experiments/release_costs.py DATA``, where DATA has ``brain_morphometry`` and ``eicu_demo``.
Seconds on one core; it prints the table's numbers.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np

from flare_sparse.config.people import propose
from flare_sparse.core.errors import DataError
from flare_sparse.privacy.release import Rule, round_count, round_metric
from flare_sparse.tasks.data.tables import Table, read_table


def take(table: Table, rows: np.ndarray, names: list[str]) -> Table:
    """Return some rows of some columns of a table, with an identifier for each."""
    columns = {name: table.columns[name][rows] for name in names if name in table.columns}
    return Table(table.source, {**columns, "id": np.array([f"p{row}" for row in rows])})


def count_columns(table: Table, rule: Rule, seed: int) -> int | None:
    """Return how many columns can be declared with five folds; None: the people are too few for the folds."""
    try:
        return len(propose(table, "id", 5, rule, seed)[0].columns)
    except DataError:
        return None


def measure_columns(folder: Path, rule: Rule) -> None:
    """Print which columns the sites of a cohort can declare with five folds."""
    for name in ("destrieux_openneuro", "desikan_abide1"):
        table = read_table(folder / f"{name}.csv.gz")
        sites = np.array(table.get_names("site"))
        found = {}
        for site in sorted(set(sites)):
            own = take(table, np.flatnonzero(sites == site), ["age", "sex", "dx"])
            found[site] = (own.rows, count_columns(own, rule, 7))
        for count in range(4):
            if having := [size for size, columns in found.values() if columns == count]:
                print(f"{name}: {len(having)} of {len(found)} sites of {min(having)} to {max(having)}: {count} columns")
        alone = [size for size, columns in found.values() if columns is None]
        print(
            f"{name}: {len(alone)} of {len(found)} sites of {min(alone)} to {max(alone)}: one cell, too few for folds"
        )


def measure_by_size(rule: Rule) -> None:
    """Print how many of four columns can be declared, by size of the site."""
    for people, minimum in itertools.product((240, 1000, 5000), (10, 20)):
        counts = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            columns = {
                "y": (rng.random(people) < 0.3).astype(int).astype(str),
                "sex": rng.integers(0, 2, people).astype(str),
                "age": np.clip(rng.normal(65, 11, people), 20, 95).round(),
                "dx": rng.choice(list("abcd"), people, p=[0.4, 0.3, 0.2, 0.1]),
                "id": np.array([f"p{row}" for row in range(people)]),
            }
            counts.append(count_columns(Table(Path("made"), columns), Rule(minimum, rule.base), seed))
        known = [count for count in counts if count is not None]
        print(
            f"people {people}, minimum {minimum}: {np.mean(known or [0]):.2f} of 4 columns, folds in {len(known)} of 20"
        )


def measure_weights(rule: Rule) -> None:
    """Print how far weights from released numbers are from those of exact ones, for four sites of 20 to 1,000."""
    rng, errors = np.random.default_rng(4), []
    for draw in range(2000):
        exact = np.exp(rng.uniform(np.log(20), np.log(1000), 4)).astype(int)
        # A site of which a fold would be too small has one cell.
        drawn = [rng.multinomial(count, [0.2] * 5).tolist() for count in exact]
        folds = [parts if min(parts) >= rule.minimum else [sum(parts)] for parts in drawn]
        secret = draw.to_bytes(32, "big")
        sent = np.array(
            [
                sum(round_count(rule, secret, f"{site} {fold}", part) for fold, part in enumerate(parts))
                for site, parts in enumerate(folds)
            ]
        )
        errors.append(np.abs(sent / sent.sum() - exact / exact.sum()).sum() / 2)
    print(f"weights of 4 sites of 5 folds: half L1 distance mean {np.mean(errors):.4f}, largest {np.max(errors):.4f}")


def measure_metrics(rule: Rule) -> None:
    """Print the error of a metric at one site and of the mean over five, by number of test subjects."""
    rng = np.random.default_rng(5)
    for people in (48, 200, 1000):
        values = rng.uniform(0.6, 0.9, (2000, 5))
        rounded = np.array([[round_metric(rule, float(value), people) for value in row] for row in values])
        site, mean = np.abs(rounded - values).mean(), np.abs((rounded - values).mean(1)).mean()
        step = rule.minimum / people
        print(f"AUC of {people} test subjects: grid {step:.3f}, error {site:.3f} at a site, {mean:.3f} for five")


def main() -> None:
    """Print all figures."""
    rule = Rule(10)
    measure_columns(Path(sys.argv[1]) / "brain_morphometry", rule)
    measure_by_size(rule)
    measure_weights(rule)
    measure_metrics(rule)


if __name__ == "__main__":
    main()
