"""Figures of one or several runs, as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..runs.results import Run, gains_over_alone

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#595959", "#a6761d")
"""Okabe and Ito's, told apart by colour-blind readers; the dashes tell more than eight apart."""
STYLES = ("-", "--", ":", "-.")
LOOK: Any = {
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


def png(draw: Callable[[list[Run]], Figure], runs: list[Run]) -> bytes:
    """A figure of these runs."""
    with mpl.rc_context(LOOK):
        figure = draw(runs)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=144, metadata={"Software": None})
        plt.close(figure)
    return buffer.getvalue()


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": STYLES[number // len(COLOURS) % len(STYLES)]}


def learning(runs: list[Run]) -> Figure:
    """The metric by round, and by what had been sent by then."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for number, run in enumerate(runs):
        rounds, figures, sent = zip(*run.curve, strict=True) if run.curve else ((), (), ())
        many = len(rounds) < 2
        left.plot(rounds, figures, marker="o" if many else None, label=run.label, **_look(number))
        right.plot(sent, figures, marker="o" if many else None, label=run.label, **_look(number))
    left.set(xlabel="rounds of training", ylabel=runs[0].metric_label, title="Quality by round")
    right.set(xlabel="MB sent, all sites, both ways", title="Quality by bytes")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    return figure


def traffic(runs: list[Run]) -> Figure:
    """Bytes of each round, and of the whole run beside dense FedAvg and the floor."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for number, run in enumerate(runs):
        sent = [(line["bytes_down"] + line["bytes_up"]) / 1e6 for line in run.rounds]
        left.plot(
            range(1, len(sent) + 1), sent, marker="." if len(sent) < 40 else None, label=run.label, **_look(number)
        )
    left.set(xlabel="question, in order", ylabel="MB", title="Sent with each question and its answers")
    left.set_ylim(bottom=0, top=1.18 * left.get_ylim()[1])
    left.legend(loc="upper center", ncols=min(len(runs), 3))
    places = range(len(runs))
    for offset, (what, label, colour) in enumerate(
        (
            ("dense_bytes", "dense FedAvg", "#bbbbbb"),
            ("payload_bytes", "sent", COLOURS[0]),
            ("floor_bytes", "floor", COLOURS[2]),
        )
    ):
        heights = [run.total(what) / 1e6 for run in runs]
        bars = right.bar([p + 0.27 * (offset - 1) for p in places], heights, 0.25, label=label, color=colour)
        right.bar_label(bars, labels=[f"{h:.3g}" for h in heights], fontsize=8)
    right.set_xticks(list(places), [run.label for run in runs])
    right.set(ylabel="MB", title="The whole run")
    right.grid(axis="x", visible=False)
    right.set_ylim(top=1.18 * right.get_ylim()[1])  # room for the legend, above the highest bar's number
    right.legend(loc="upper center", ncols=3)
    return figure


def sites(runs: list[Run]) -> Figure:
    """The metric at each site at the end."""
    names = sorted({site for run in runs for site in run.by_site})
    figure, axes = plt.subplots(figsize=(10, max(2.2, 0.8 + 0.34 * len(names))), layout="constrained")
    for number, run in enumerate(runs):
        shift = 0.5 * (number - (len(runs) - 1) / 2) / max(len(runs), 1)
        known = [(figure_, names.index(site) + shift) for site, figure_ in run.by_site.items()]
        axes.scatter([x for x, _ in known], [y for _, y in known], label=run.label, color=_look(number)["color"], s=34)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    better = "left" if runs[0].lower_is_better else "right"
    axes.set(xlabel=f"{runs[0].metric_label}; better to the {better}", title="At each site, after the last round")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def gains(runs: list[Run]) -> Figure:
    """How much better off each site is than alone, by run."""
    figure, axes = _bars(runs, gains_over_alone(runs), "{:+.3g}")
    axes.axvline(0, color="0.3", linewidth=1)
    axes.margins(x=0.12)
    axes.set(xlabel=f"gain, {runs[0].metric_label}", title="Better off than alone, to the right")
    return figure


def layers(runs: list[Run]) -> Figure:
    """What share of each layer lives at the end."""
    masked = [run for run in runs if run.layers and min(run.layers.values()) < 1]
    shares = {run.label: {name: 100 * share for name, share in run.layers.items()} for run in masked}
    figure, axes = _bars(runs, shares, "{:.3g} %")
    axes.set(xlabel="live weights, %", title="What lives of each layer", xlim=(0, 112))
    return figure


def _bars(runs: list[Run], shown: Mapping[str, Mapping[str, float]], text: str) -> tuple[Figure, Axes]:
    """A bar for each name and run, with its figure as ``text`` has it; ``shown`` is by the runs' labels, then by name."""
    names = list(dict.fromkeys(name for found in shown.values() for name in found))
    tall = 0.9 + 0.17 * len(names) * max(len(shown), 2)
    figure, axes = plt.subplots(figsize=(10, max(2.2, tall)), layout="constrained")
    height, labels = 0.8 / len(shown), [run.label for run in runs]
    for number, (label, found) in enumerate(shown.items()):
        places = [names.index(name) + height * (number - (len(shown) - 1) / 2) for name in found]
        colour = _look(labels.index(label))["color"]
        bars = axes.barh(places, list(found.values()), height * 0.9, label=label, color=colour)
        axes.bar_label(bars, labels=[f" {text.format(value)} " for value in found.values()], fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure, axes
