"""What the columns of a table contain at all sites; ``flare-sparse describe`` compares the sites."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..core.findings import Finding
from ..tasks.task import Column

MAX_ROWS = 20
"""Columns beyond which complete numbers are counted instead of listed."""
_MAX_LABELS = 6


def describe_columns(sites: Mapping[str, Sequence[Column]]) -> Iterator[Finding]:
    """Yield a note per column: what it is, its range or labels, missing values, and the sites that lack it."""
    by_name: dict[str, dict[str, Column]] = {}
    for site, columns in sites.items():
        for column in columns:
            by_name.setdefault(column.name, {})[site] = column
    shown = folded = 0
    for name, at in by_name.items():
        kinds = " or ".join(sorted({column.kind for column in at.values()}))
        lacking = [site for site in sites if site not in at]
        missing, rows = sum(column.missing for column in at.values()), sum(column.rows for column in at.values())
        if kinds == "number" and not lacking and not missing and shown >= MAX_ROWS:
            folded += 1
            continue
        shown += 1
        share = f" ({missing / rows:.0%})" if missing else ""
        parts = [kinds, _describe_values(at, kinds), f"missing: {missing}{share}"]
        parts += [f"no such column at {', '.join(lacking)}"] if lacking else []
        yield Finding("NOTE", f"column {name}", "; ".join(parts))
    if folded:
        yield Finding("NOTE", "columns", f"and {folded} more complete columns of numbers")


def _describe_values(at: Mapping[str, Column], kind: str) -> str:
    numbers = np.concatenate([column.numbers for column in at.values()])
    labels = sum((Counter(column.labels) for column in at.values()), Counter[str]())
    if kind == "subject":
        count_at = Counter(label for column in at.values() for label in column.labels)
        repeated = sum(count > 1 for count in count_at.values())
        several = f", {repeated} with rows at several sites" if repeated else ""
        return f"{len(labels)} subjects, up to {max(labels.values(), default=0)} rows each{several}"
    shown = [f"{label} {count}" for label, count in labels.most_common(_MAX_LABELS)]
    more = [f"{len(labels) - _MAX_LABELS} more"] if len(labels) > _MAX_LABELS else []
    if len(numbers):
        low, high = numbers.min(), numbers.max()
        # A job scales its target by constants: these.
        deviation = f", deviation {numbers.std():.3g}" if kind == "target" else ""
        spread = f", mean {numbers.mean():.4g}{deviation}"
        shown.append(f"always {low:.4g}" if low == high else f"{low:.4g} to {high:.4g}{spread}")
    return ", ".join([*shown, *more]) or "none"
