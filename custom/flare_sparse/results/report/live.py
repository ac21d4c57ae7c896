"""Page of a run that proceeds: written again after each round, readable offline and on a phone."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ..runs.progress import (
    CELLS,
    compare_with_dense,
    estimate_seconds_left,
    format_bytes,
    format_cells,
    format_duration,
)
from .tables import ReportTable, format_metric
from .template import fill_template

Line = Mapping[str, Any]
REFRESH_S = 5
"""Seconds after which the page of a run that has not ended loads itself again."""
SHOWN_ROUNDS = 50
LEFT, TOP, WIDTH, HEIGHT = 60, 12, 530, 180
"""Place of the curve in the picture, in its units."""


def format_site_page(
    site: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    cards: Sequence[tuple[str, str]],
    now: Sequence[str],
) -> str:
    """Return the page of one site: what it was asked and sent, and how far its training is."""
    content = {
        "title": f"Site {site}",
        "subtitle": "; ".join(now) or "no training now",
        "cards": cards,
        "curve": None,
        "tables": [ReportTable("Runs", list(columns), [list(row) for row in rows], "")],
        "refresh_s": REFRESH_S,
    }
    return fill_template("live.html.jinja", content)


def format_live_page(lines: Sequence[Line], now: Sequence[str] = (), *, has_ended: bool) -> str:
    """Return the page of a run.

    Args:
        lines: lines of ``rounds.jsonl`` so far.
        now: how far each site is within the round, as text.
        has_ended: whether no further line will come; the page then no longer loads itself again.
    """
    last = lines[-1] if lines else None
    content = {
        "title": f"Run {last['run']}" if last else "A run that has not committed a round yet",
        "subtitle": "; ".join([_describe_state(lines, has_ended=has_ended), *now]),
        "cards": _build_cards(lines) if lines else [],
        "curve": _draw_curve(lines),
        "tables": [_build_sites(lines), *_build_events(lines), _build_rounds(lines)] if lines else [],
        "refresh_s": None if has_ended else REFRESH_S,
    }
    return fill_template("live.html.jinja", content)


def _describe_state(lines: Sequence[Line], *, has_ended: bool) -> str:
    if has_ended:
        return "ended"
    if not lines:
        return "waiting for the first round"
    left = estimate_seconds_left(lines)
    return f"running; about {format_duration(left)} left" if left else "running"


def _build_cards(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Return round, metric, bytes and, with differential privacy, the largest spent epsilon."""
    last = lines[-1]
    sent = sum(line["bytes_up"] + line["bytes_down"] for line in lines)
    dense = sum(line["dense_bytes"] for line in lines)
    value = _find_last(line["metrics"].get(line["metric"]) for line in lines)
    spent = [epsilon for line in lines for epsilon in line.get("spent_epsilon", {}).values()]
    return [
        (f"{min(last['round'], last['rounds'])} of {last['rounds']}", "rounds"),
        (format_metric(value), f"{last['metric']} {last['unit']}".strip()),
        (format_bytes(sent), compare_with_dense(sent, dense)),
        *([(f"{max(spent):.2f}", "epsilon, the most that a site has spent")] if spent else []),
    ]


def _find_last(values: Iterable[float | None]) -> float | None:
    """Return the last value that is there; None without one."""
    return next((value for value in reversed(list(values)) if value is not None), None)


def _draw_curve(lines: Sequence[Line]) -> SimpleNamespace | None:
    """Return the metric by round as a line; None before there are two values."""
    found = [(line["round"], line["metrics"].get(line["metric"])) for line in lines]
    points = [(number, float(value)) for number, value in found if value is not None]
    if len(points) < 2:
        return None
    low, high = (function(value for _, value in points) for function in (min, max))
    start, end = points[0][0], points[-1][0]
    places = [
        f"{LEFT + WIDTH * (number - start) / max(end - start, 1):.1f},"
        f"{TOP + HEIGHT * (high - value) / ((high - low) or 1):.1f}"
        for number, value in points
    ]
    metric, unit = lines[-1]["metric"], lines[-1]["unit"]
    ends = {name: f"{value:.3g}" for name, value in (("low", low), ("high", high))}
    last = "final model" if end > lines[-1]["rounds"] else f"round {end}"
    span = {"first": f"{points[0][1]:.3g}", "last": f"{points[-1][1]:.3g}", "start": start, "end": last}
    return SimpleNamespace(points=" ".join(places), title=f"{metric} ({unit})" if unit else metric, **ends, **span)


def _build_sites(lines: Sequence[Line]) -> ReportTable:
    """Return a row for each site: what it contributed, its metric, and why it is missing now."""
    names = sorted({site for line in lines for site in line["sites_asked"]})
    rows = []
    for site in names:
        asked = [line for line in lines if site in line["sites_asked"]]
        value = _find_last(line.get("site_metrics", {}).get(site, {}).get(line["metric"]) for line in lines)
        contributed = sum(site in line["sites_contributed"] for line in asked)
        rows.append([site, f"{contributed} of {len(asked)}", format_metric(value), _explain_absence(site, asked[-1])])
    return ReportTable("Sites", ["site", "contributed", str(lines[-1]["metric"]), "last request"], rows, "")


def _explain_absence(site: str, line: Line) -> str:
    """Return what became of the last request to a site, as one word or the code of the reason."""
    if site in line["sites_contributed"]:
        return "answered"
    if site in line["timed_out"]:
        return "did not reply in time"
    if site in line.get("quarantined", ()):
        return "in quarantine"
    reason = line["rejected"].get(site) or line.get("excluded", {}).get(site)
    return str(reason).partition(":")[0] if reason else "did not contribute"


def _build_events(lines: Sequence[Line]) -> list[ReportTable]:
    rows = [
        [str(line["round"]), str(event["site"]), str(event["detail"])]
        for line in lines
        for event in line.get("events", ())
    ]
    return [ReportTable("Events", ["round", "site", "what happened"], rows, "")] if rows else []


def _build_rounds(lines: Sequence[Line]) -> ReportTable:
    """Return the last rounds, the newest first."""
    rows = [format_cells(line) for line in reversed(lines[-SHOWN_ROUNDS:])]
    columns = [str(lines[-1]["metric"]) if head == "metric" else head for head in CELLS]
    return ReportTable("Rounds", columns, rows, f"the last {SHOWN_ROUNDS}" if len(lines) > SHOWN_ROUNDS else "")
