"""What the columns of a table contain at all sites, and where they differ."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ..core.findings import Finding
from ..tasks.task import Column

MAX_ROWS = 20
"""Columns beyond which complete numbers are counted instead of listed."""
_MAX_LABELS = 6


def describe_columns(sites: Mapping[str, Sequence[Column]]) -> Iterator[Finding]:
    """Yield a note per column: what it is, missing values, range or labels, and the sites that differ most."""
    by_name: dict[str, dict[str, Column]] = {}
    for site, columns in sites.items():
        for column in columns:
            by_name.setdefault(column.name, {})[site] = column
    shown = folded = 0
    for name, at in by_name.items():
        kinds = " or ".join(sorted({column.kind for column in at.values()}))
        lacking = [site for site in sites if site not in at]
        if (
            kinds == "number"
            and not lacking
            and not any(column.missing for column in at.values())
            and shown >= MAX_ROWS
        ):
            folded += 1
            continue
        shown += 1
        differences = f"no such column at {', '.join(lacking)}" if lacking else _compare_sites(at, kinds)
        parts = [kinds, _describe_values(at, kinds), f"missing: {_describe_missing(at)}", differences]
        yield Finding("NOTE", f"column {name}", "; ".join(part for part in parts if part))
    if folded:
        yield Finding("NOTE", "columns", f"and {folded} more complete columns of numbers")


def _describe_missing(at: Mapping[str, Column]) -> str:
    missing, rows = sum(column.missing for column in at.values()), sum(column.rows for column in at.values())
    if not missing:
        return "0"
    share = {site: column.missing / max(column.rows, 1) for site, column in at.items()}
    worst = max(share, key=lambda site: share[site])
    # A site that lacks a column altogether is what a mean over sites hides.
    is_uneven = share[worst] > missing / rows + 0.05
    return f"{missing} ({missing / rows:.0%})" + (f", {share[worst]:.0%} at {worst}" if is_uneven else "")


def _describe_values(at: Mapping[str, Column], kind: str) -> str:
    numbers = np.concatenate([column.numbers for column in at.values()])
    labels = sum((Counter(column.labels) for column in at.values()), Counter[str]())
    if kind == "subject":
        return f"{len(labels)} subjects, up to {max(labels.values(), default=0)} rows each"
    shown = [f"{label} {count}" for label, count in labels.most_common(_MAX_LABELS)]
    more = [f"{len(labels) - _MAX_LABELS} more"] if len(labels) > _MAX_LABELS else []
    if len(numbers):
        low, high = numbers.min(), numbers.max()
        # A job scales its target by constants: these.
        deviation = f", deviation {numbers.std():.3g}" if kind == "target" else ""
        spread = f", mean {numbers.mean():.4g}{deviation}"
        shown.append(f"always {low:.4g}" if low == high else f"{low:.4g} to {high:.4g}{spread}")
    return ", ".join([*shown, *more]) or "none"


def _compare_sites(at: Mapping[str, Column], kind: str) -> str:
    """Return the sites with the lowest and the highest mean, or share of the most frequent label."""
    if kind == "subject":
        everywhere = Counter(label for column in at.values() for label in column.labels)
        repeated = sum(count > 1 for count in everywhere.values())
        return f"{repeated} subjects have rows at several sites" if repeated else ""
    labels = sum((Counter(column.labels) for column in at.values()), Counter[str]())
    frequent = labels.most_common(1)[0][0] if labels else ""
    if labels:
        value = {site: c.labels.get(frequent, 0) / sum(c.labels.values()) for site, c in at.items() if c.labels}
        text, head = "{:.0%}", f"{frequent}: "
    else:
        value = {site: float(c.numbers.mean()) for site, c in at.items() if len(c.numbers)}
        text, head = "{:.4g}", "mean "
    if len(set(value.values())) < 2:
        return ""
    low, high = min(value, key=lambda site: value[site]), max(value, key=lambda site: value[site])
    return f"{head}{text.format(value[low])} ({low}) to {text.format(value[high])} ({high})"
