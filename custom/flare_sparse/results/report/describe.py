"""The page of ``flare-sparse describe``: columns by site, with their warnings on top."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from ..runs.description import Sites, is_label
from .figures import get_line_style, render_png
from .page import embed_figure
from .tables import ReportTable
from .templates import fill_template

_ACROSS = 3
"""Histograms side by side."""


def write_description(record: Mapping[str, Any], out: Path) -> list[Path]:
    """Write ``description.html`` and its figure.

    Args:
        record: what ``flare-sparse describe`` keeps as JSON: name, sites, least, columns, warnings.
        out: folder, created if missing.

    Returns:
        The files written, the page first.
    """
    out.mkdir(parents=True, exist_ok=True)
    page, image = out / "description.html", out / "columns.png"
    numbers = {name: sites for name, sites in record["columns"].items() if not is_label(name)}
    content = {
        "title": record["name"],
        "subtitle": f"Before training: {len(record['sites'])} sites. No site sent a figure of fewer than "
        f"{record['least']} rows.",
        "warnings": record["warnings"],
        "figure": embed_figure(render_png(_draw_histograms, numbers), image) if numbers else None,
        "tables": [_build_labels(record), _build_numbers(numbers, record["least"])],
    }
    page.write_text(fill_template("report/describe.html.jinja", content), encoding="utf-8")
    return [page, image] if numbers else [page]


def _build_labels(record: Mapping[str, Any]) -> ReportTable:
    sites: Sequence[str] = record["sites"]
    rows = []
    for name, by_site in record["columns"].items():
        if is_label(name):
            column, _, label = name.partition("=")
            rows.append([f"{column} {label}", *(_format_share(by_site.get(site)) for site in sites)])
    note = (
        "Rows of each label, and their share at the site; a dash: none, too few, or left out with one of too few. Few "
        "missing values of a number are not listed; they follow from the rows below."
    )
    return ReportTable("Labels and missing values", ["label", *sites], rows, note)


def _format_share(statistics: Mapping[str, Any] | None) -> str:
    if statistics is None:
        return "-"
    return f"{statistics['mean'] * statistics['count']:.0f} ({statistics['mean']:.0%})"


def _build_numbers(numbers: Mapping[str, Sites], least: int) -> ReportTable:
    quantiles = [own["quantile"] for by_site in numbers.values() for own in by_site.values()]
    shares = sorted({share for quantile in quantiles for share in quantile}, key=int)
    rows = [
        [name, site, f"{own['count']:.0f}", f"{own['mean']:.4g}", f"{own['stddev']:.4g}"]
        + [f"{own['quantile'][share]:.4g}" if share in own["quantile"] else "-" for share in shares]
        for name, by_site in numbers.items()
        for site, own in sorted(by_site.items())
    ]
    columns = ["column", "site", "rows", "mean", "deviation", *(f"{share} %" for share in shares)]
    note = (
        f"A quantile is the mean of the {least} rows nearest to it in rank, or of more where a site's policy asks for "
        "it; a dash: too few rows lie beyond it."
    )
    return ReportTable("Numbers", columns, rows, note)


def _draw_histograms(numbers: Mapping[str, Sites]) -> Figure:
    sites = sorted({site for by_site in numbers.values() for site in by_site})
    lines = -(-len(numbers) // _ACROSS)
    figure, axes = plt.subplots(lines, _ACROSS, figsize=(10, 2.6 * lines + 0.5), layout="constrained", squeeze=False)
    for axis in axes.flat[len(numbers) :]:
        axis.set_axis_off()
    named = {}
    for axis, (name, by_site) in zip(axes.flat, numbers.items(), strict=False):
        for number, site in enumerate(sites):
            # Each cell has a lower bound, an upper bound and a number of rows.
            bins = by_site.get(site, {}).get("histogram", [])
            if total := sum(count for *_, count in bins):
                edges = [bins[0][0], *(high for _, high, _ in bins)]
                density = [count / total / (high - low) for low, high, count in bins]
                named[site] = axis.stairs(density, edges, **get_line_style(number))
        axis.set_title(name)
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=6)
    return figure
