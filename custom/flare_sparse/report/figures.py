"""Figures of one or several runs."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl

# Figures are rendered without a display; the backend must be set before pyplot is imported.
mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..runs.results import RunResult, compute_site_gains

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#595959", "#a6761d")
"""Palette of Okabe and Ito, safe for colour-blind readers; more than eight runs also differ in line style."""
STYLES = ("-", "--", ":", "-.")
RC_PARAMS: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


def render_png(draw: Callable[[list[RunResult]], Figure], runs: list[RunResult]) -> bytes:
    """Draw a figure of these runs and return it as a PNG file."""
    with mpl.rc_context(RC_PARAMS):
        figure = draw(runs)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
        plt.close(figure)
    return buffer.getvalue()


def _get_line_style(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number // len(COLOURS) % len(STYLES)]}


def draw_learning_curves(runs: list[RunResult]) -> Figure:
    """Draw the metric by round, and by the bytes sent until then."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for number, run in enumerate(runs):
        rounds, values, sent = zip(*run.learning_curve, strict=True) if run.learning_curve else ((), (), ())
        # A line through a single point is invisible without a marker.
        marker = "o" if len(rounds) < 2 else None
        left.plot(rounds, values, marker=marker, label=run.label, **_get_line_style(number))
        right.plot(sent, values, marker=marker, label=run.label, **_get_line_style(number))
    left.set(xlabel="rounds of training", ylabel=runs[0].metric_label, title="Quality by round")
    right.set(xlabel="MB sent, all sites, both directions", title="Quality by bytes")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    return figure


def draw_traffic(runs: list[RunResult]) -> Figure:
    """Draw the bytes of each request with its replies, and of the whole run beside dense FedAvg and the floor."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, run in enumerate(runs):
        sent = [(line["bytes_down"] + line["bytes_up"]) / 1e6 for line in run.rounds]
        left.plot(
            range(1, len(sent) + 1),
            sent,
            marker="." if len(sent) < 40 else None,
            label=run.label,
            **_get_line_style(number),
        )
    left.set(xlabel="request, in order", ylabel="MB", title="Bytes of each request and its replies")
    left.set_ylim(bottom=0, top=1.18 * left.get_ylim()[1])
    left.legend(loc="upper center", ncols=min(len(runs), 3))
    positions = range(len(runs))
    for offset, (key, label, colour) in enumerate(
        (
            ("dense_bytes", "dense FedAvg", "#bbbbbb"),
            ("payload_bytes", "sent", COLOURS[0]),
            ("floor_bytes", "floor", COLOURS[2]),
        )
    ):
        heights = [run.sum_directions(key) / 1e6 for run in runs]
        bars = right.bar([p + 0.27 * (offset - 1) for p in positions], heights, 0.25, label=label, color=colour)
        right.bar_label(bars, labels=[f"{h:.3g}" for h in heights], fontsize=8)
    right.set_xticks(list(positions), [run.label for run in runs])
    right.set(ylabel="MB", title="Bytes of the whole run")
    right.grid(axis="x", visible=False)
    # Leave room for the legend above the label of the highest bar.
    right.set_ylim(top=1.18 * right.get_ylim()[1])
    right.legend(loc="upper center", ncols=3)
    return figure


def draw_site_metrics(runs: list[RunResult]) -> Figure:
    """Draw the final metric at each site."""
    names = sorted({site for run in runs for site in run.site_metrics})
    figure, axes = plt.subplots(figsize=(10, max(2.2, 0.8 + 0.34 * len(names))), layout="constrained")
    for number, run in enumerate(runs):
        shift = 0.5 * (number - (len(runs) - 1) / 2) / max(len(runs), 1)
        values = list(run.site_metrics.values())
        positions = [names.index(site) + shift for site in run.site_metrics]
        axes.scatter(values, positions, label=run.label, color=_get_line_style(number)["color"], s=34)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    better = "left" if runs[0].lower_is_better else "right"
    axes.set(xlabel=f"{runs[0].metric_label}; better to the {better}", title="Each site after the last round")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_gains(runs: list[RunResult]) -> Figure:
    """Draw the gain of each site over training alone, by run."""
    figure, axes = _draw_bars(runs, compute_site_gains(runs), "{:+.3g}")
    axes.axvline(0, color="0.3", linewidth=1)
    axes.margins(x=0.12)
    axes.set(xlabel=f"gain, {runs[0].metric_label}", title="Gain over training alone (right: better)")
    return figure


def draw_layer_densities(runs: list[RunResult]) -> Figure:
    """Draw the final density of each layer."""
    masked = [run for run in runs if run.layer_densities and min(run.layer_densities.values()) < 1]
    percentages = {run.label: {name: 100 * share for name, share in run.layer_densities.items()} for run in masked}
    figure, axes = _draw_bars(runs, percentages, "{:.3g} %")
    axes.set(xlabel="live entries, %", title="Live entries of each layer", xlim=(0, 112))
    return figure


def _draw_bars(
    runs: list[RunResult], values: Mapping[str, Mapping[str, float]], label_format: str
) -> tuple[Figure, Axes]:
    """Draw a labelled bar for each name and run.

    Args:
        runs: all runs of the report; a run's position in it determines its colour.
        values: values by the run's label, then by name.
        label_format: format string of a bar's label.
    """
    names = list(dict.fromkeys(name for by_name in values.values() for name in by_name))
    figure_height = max(2.2, 0.9 + 0.17 * len(names) * max(len(values), 2))
    figure, axes = plt.subplots(figsize=(10, figure_height), layout="constrained")
    bar_height, labels = 0.8 / len(values), [run.label for run in runs]
    for number, (label, by_name) in enumerate(values.items()):
        positions = [names.index(name) + bar_height * (number - (len(values) - 1) / 2) for name in by_name]
        colour = _get_line_style(labels.index(label))["color"]
        bars = axes.barh(positions, list(by_name.values()), bar_height * 0.9, label=label, color=colour)
        axes.bar_label(bars, labels=[f" {label_format.format(value)} " for value in by_name.values()], fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure, axes
