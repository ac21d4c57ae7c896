"""What federated statistics warn of before a study runs."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

Sites = Mapping[str, Mapping[str, Any]]
"""Statistics of one column by site: ``count``, ``mean``, ``stddev``, ``quantile`` and ``histogram``."""
FAR, RATIO = 2.0, 3.0
"""Distance of a site's mean from that of the others, in their deviations, and as a ratio, from which its unit is
doubted."""
UNEVEN = 0.3
"""Difference of the shares of a label between two sites that is worth a warning."""


def is_label(column: str) -> bool:
    """Return whether a column is one of 0 and 1 for a label, such as ``sex=F``."""
    return "=" in column


def find_warnings(columns: Mapping[str, Sites], sites: Sequence[str], expected: Sequence[str] = ()) -> list[str]:
    """Return what may decide a study before it runs, one sentence each.

    Args:
        columns: statistics by column and site.
        sites: names of all sites.
        expected: columns that the study needs.
    """
    known = {name.partition("=")[0] for name in columns}
    unknown = [f"{name}: no site reported it: too few rows have a value" for name in expected if name not in known]
    return [*unknown, *_compare_labels(columns), *_compare_numbers(columns, sites)]


def _compare_labels(columns: Mapping[str, Sites]) -> Iterator[str]:
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for column, by_site in columns.items():
        if is_label(column):
            name, _, label = column.partition("=")
            for site, statistics in by_site.items():
                shares.setdefault(name, {}).setdefault(site, {})[label] = float(statistics["mean"])
    for name, known in shares.items():
        labels = sorted({label for own in known.values() for label in own})
        alone = [f"{site} has {max(own, key=own.__getitem__)} alone" for site, own in known.items() if _is_alone(own)]
        if len(labels) > 1 and alone:
            yield (
                f"{name}: {', '.join(alone)}; at all sites it is {' or '.join(labels)}. A model can learn the site in "
                "its place"
            )
            continue
        # A share that a site did not send may be small, or left out to protect a rare label beside it. But of a site
        # that sent the numbers, few are missing or none.
        whole = {site: {"missing": 0.0} for site in columns.get(name, ()) if site not in known}
        shares_at = {**known, **whole}
        spans = {
            label: sorted((own[label], site) for site, own in shares_at.items() if label in own) for label in labels
        }
        label = max(labels, key=lambda each: spans[each][-1][0] - spans[each][0][0])
        (low, first), (high, last) = spans[label][0], spans[label][-1]
        if high - low >= UNEVEN:
            what = "has no value" if label == "missing" else f"is {label}"
            few = f"{low:.0%}" if low else "few or none"
            yield (
                f"{name} {what} in {few} of the rows of {first} and in {high:.0%} of {last}: a common model may learn "
                "the site in its place"
            )


def _is_alone(shares: Mapping[str, float]) -> bool:
    """Return whether all rows of a site have one label; one that is missing everywhere is no label."""
    return max(shares.values()) > 0.999 and "missing" not in shares


def _compare_numbers(columns: Mapping[str, Sites], sites: Sequence[str]) -> Iterator[str]:
    for name, by_site in columns.items():
        if is_label(name):
            continue
        if lacking := [site for site in sites if site not in by_site]:
            yield f"{name}: {', '.join(lacking)} reported none, or too few rows"
        if len({own["mean"] for own in by_site.values()}) == 1 and not any(own["stddev"] for own in by_site.values()):
            value = next(iter(by_site.values()))["mean"]
            yield f"{name}: {value:.4g} in all rows: a column that does not vary tells a model nothing"
            continue
        for site, own in by_site.items():
            others = [part for other, part in by_site.items() if other != site]
            if not others:
                continue
            # Medians: one site in another unit must not make the others look far away.
            mean, spread = (median(part[key] for part in others) for key in ("mean", "stddev"))
            ratio = _compare_scales(own["mean"], mean)
            if abs(own["mean"] - mean) > FAR * spread and ratio >= RATIO:
                yield (
                    f"{name}: the mean of {site} is {own['mean']:.4g}, and {mean:.4g} at the other sites: is it in "
                    "another unit?"
                )


def _compare_scales(first: float, second: float) -> float:
    low, high = sorted((abs(first), abs(second)))
    return high / low if low else float("inf")
