"""Figures of one or several runs, of what their models predict for the test subjects, and of a sweep.

Predictions exist only where the data of the sites is (:mod:`flare_sparse.results.runs.predictions`). The metrics in
figures are those of the record; nothing is measured here.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any, TypeVar

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...core.ranking import bin_risks, estimate_survival, find_curve
from ...tasks.task import Kind
from ..runs.predictions import RUN, CasePicture, Predictions
from ..runs.results import RunResult, compute_site_gains, group_by_seed
from ..runs.sweep import SettingsResult

# Figures are rendered without a display.
mpl.use("Agg")


STYLE = "flare_sparse.results.report.plots"
"""Style of all plots; its eight colours are C0 to C7, and more runs also differ in line style."""
T = TypeVar("T")
LINES = ("-", "--", ":", "-.")


def render_png(draw: Callable[[T], Figure], content: T) -> bytes:
    """Draw a figure of some runs, or of other content, and return it as a PNG file."""
    with plt.style.context(STYLE):
        figure = draw(content)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", metadata={"Software": None})
        plt.close(figure)
    return buffer.getvalue()


def get_line_style(number: int) -> dict[str, Any]:
    """Return colour and line style of a run or a site by its number."""
    return {"color": f"C{number}", "linestyle": LINES[number // 8 % len(LINES)]}


def draw_learning_curves(runs: list[RunResult]) -> Figure:
    """Draw the metric by round, and by the bytes sent until then."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for number, (label, group) in enumerate(group_by_seed(runs)):
        curves = [run.learning_curve for run in group]
        # Seeds evaluate the same rounds unless a round failed; a mean is over the rounds that all of them have.
        points = list(zip(*curves, strict=False))
        rounds = [point[0][0] for point in points]
        values = [[value for _, value, _ in point] for point in points]
        sent = [mean(size for _, _, size in point) for point in points]
        # A line through a single point is invisible without a marker.
        style = {**get_line_style(number), "marker": "o" if len(rounds) < 2 else None}
        for axes, x in ((left, rounds), (right, sent)):
            axes.plot(x, [mean(v) for v in values], label=label, **style)
            if len(group) > 1:
                axes.fill_between(
                    x, [min(v) for v in values], [max(v) for v in values], color=style["color"], alpha=0.15
                )
    left.set(xlabel="rounds of training", ylabel=runs[0].metric_label, title="Quality by round")
    right.set(xlabel="MB sent, all sites, both directions", title="Quality by bytes")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend()
    return figure


def draw_traffic(runs: list[RunResult]) -> Figure:
    """Draw the bytes of each request with its replies, and of the whole run beside dense FedAvg and the floor."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    groups = group_by_seed(runs)
    labels = [label for label, _ in groups]
    for number, (label, group) in enumerate(groups):
        lines = zip(*(run.rounds for run in group), strict=False)
        sent = [mean(line["bytes_down"] + line["bytes_up"] for line in request) / 1e6 for request in lines]
        marker = "." if len(sent) < 40 else None
        left.plot(range(1, len(sent) + 1), sent, marker=marker, label=label, **get_line_style(number))
    left.set(xlabel="request, in order", ylabel="MB", title="Bytes of each request and its replies")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.set_ylim(bottom=0, top=1.28 * left.get_ylim()[1])
    left.legend(loc="upper center", ncols=min(len(groups), 3 if max(map(len, labels)) < 14 else 2))
    positions = range(len(groups))
    for offset, (key, label, colour) in enumerate(
        (("dense_bytes", "dense FedAvg", "#bbbbbb"), ("payload_bytes", "sent", "C0"), ("floor_bytes", "floor", "C2"))
    ):
        heights = [mean(run.sum_directions(key) for run in group) / 1e6 for _, group in groups]
        bars = right.bar([p + 0.27 * (offset - 1) for p in positions], heights, 0.25, label=label, color=colour)
        right.bar_label(bars, labels=[f"{h:.3g}" for h in heights], fontsize=9)
    right.set_xticks(list(positions), [label.replace(" (", "\n(") for label in labels])
    right.set(ylabel="MB", title="Bytes of the whole run")
    right.grid(axis="x", visible=False)
    # Leave room for the legend above the label of the highest bar.
    right.set_ylim(top=1.18 * right.get_ylim()[1])
    right.legend(loc="upper center", ncols=3)
    return figure


def draw_sites(runs: list[RunResult]) -> Figure:
    """Draw each site's final metric and, beside a run of ``local_only``, its gain over training alone."""
    better = "left" if runs[0].lower_is_better else "right"
    panels: list[tuple[str, str, Mapping[str, Mapping[str, float]]]] = [
        ("Each site after the last round", f"better to the {better}", {run.label: run.site_metrics for run in runs})
    ]
    if gains := compute_site_gains(runs):
        panels.append(("Gain over training alone", "better to the right", gains))
    sites, groups = sorted({site for run in runs for site in run.site_metrics}), group_by_seed(runs)
    size = (10, max(2.2, 0.8 + 0.34 * len(sites)))
    figure, row = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axes, (title, direction, values) in zip(row[0], panels, strict=True):
        for number, (label, group) in enumerate(groups):
            shift, colour = 0.5 * (number - (len(groups) - 1) / 2) / len(groups), get_line_style(number)["color"]
            measured = [[values[r.label][site] for r in group if site in values.get(r.label, {})] for site in sites]
            points = [(position + shift, found) for position, found in enumerate(measured) if found]
            heights = [height for height, _ in points]
            axes.scatter([mean(found) for _, found in points], heights, label=label, color=colour, s=34)
            axes.hlines(heights, [min(found) for _, found in points], [max(found) for _, found in points], color=colour)
        axes.set(xlabel=f"{runs[0].metric_label}; {direction}", title=title)
        if values is gains:
            axes.axvline(0, color="0.3", linewidth=1)
    row[0][0].set_yticks(range(len(sites)), sites)
    row[0][0].invert_yaxis()
    row[0][-1].legend(*row[0][0].get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def has_sparse_layers(run: RunResult) -> bool:
    """Return whether an entry of a layer is off."""
    return min(run.layer_densities.values(), default=1.0) < 1


def draw_layer_densities(runs: list[RunResult]) -> Figure:
    """Draw the final density of each layer: a labelled bar for each layer and group of runs, the mean over seeds."""
    percentages, colours = {}, {}
    for number, (label, group) in enumerate(group_by_seed(runs)):
        colours[label] = get_line_style(number)["color"]
        masked = [run.layer_densities for run in group if has_sparse_layers(run)]
        names = dict.fromkeys(name for part in masked for name in part)
        if masked:
            percentages[label] = {name: 100 * mean(part[name] for part in masked if name in part) for name in names}
    layers = list(dict.fromkeys(name for by_name in percentages.values() for name in by_name))
    size = (10, max(2.2, 0.9 + 0.21 * len(layers) * max(len(percentages), 2)))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    height = 0.8 / len(percentages)
    for number, (label, by_name) in enumerate(percentages.items()):
        positions = [layers.index(name) + height * (number - (len(percentages) - 1) / 2) for name in by_name]
        bars = axes.barh(positions, list(by_name.values()), height * 0.9, label=label, color=colours[label])
        axes.bar_label(bars, fmt=" {:.3g} % ", fontsize=9)
    axes.set_yticks(range(len(layers)), layers)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set(xlabel="live entries, %", title="Live entries of each layer", xlim=(0, 112))
    return figure


def draw_cases(runs: list[RunResult]) -> Figure:
    """Draw the cases of the first run: a row for each site, the best, the median and the worst case side by side."""
    cases = runs[0].pictures
    sites = list(dict.fromkeys(case.site for case in cases))
    columns = list(dict.fromkeys(case.rank for case in cases))
    figure, axes = plt.subplots(
        len(sites), len(columns), figsize=(3.2 * len(columns), 3.0 * len(sites)), squeeze=False, layout="constrained"
    )
    for case in cases:
        draw_case(axes[sites.index(case.site), columns.index(case.rank)], case, runs[0].metric)
    if len(runs) > 1:
        figure.suptitle(runs[0].label)
    return figure


def draw_case(axes: Axes, case: CasePicture, metric: str) -> None:
    """Draw one case: its slice, the outlines of the labels (solid) and of the prediction (dashed)."""
    picture = case.picture
    axes.imshow(picture.image, cmap="gray", aspect=picture.aspect, interpolation="nearest")
    axes.set_title(f"{case.site}, {case.rank}: {metric} {case.value:.3f}", fontsize=9)
    axes.set_axis_off()
    for classes, style in ((picture.labels, "solid"), (picture.predicted, "dashed")):
        for number in np.unique(classes[classes != 0]).tolist():
            axes.contour(classes == number, levels=[0.5], colors=[f"C{number - 1}"], linestyles=style, linewidths=1.2)


MOST_RUNS = 6
"""Runs that have a panel or a curve of their own; more could not be told apart."""


def select_predictions(runs: list[RunResult], kind: Kind) -> dict[str, Predictions]:
    """Return the predictions of the first runs that predict one target of a kind, by label."""
    columns = 2 if kind == "survival" else 1
    found = {
        run.label: part
        for run in runs
        if (part := run.predictions) is not None and part.kind == kind and part.targets.shape[1] == columns
    }
    return dict(list(found.items())[:MOST_RUNS])


def explain_missing_predictions(runs: list[RunResult]) -> str:
    """Return why runs have no figures of predictions; empty if all have predictions."""
    lacking = [run.label for run in runs if run.predictions is None]
    if not lacking:
        return ""
    return (
        f"No predictions of {', '.join(lacking)} are shown (against the truth, ROC, survival, calibration): a site of "
        "a federation sends metrics, as its policy allows, and no prediction of a person. Where the data of all sites "
        "is on this machine, flare-sparse report computes them, without --plain."
    )


def draw_predicted(runs: list[RunResult]) -> Figure:
    """Draw the predicted over the true value of each test example: a panel for each run, a colour for each site."""
    found = select_predictions(runs, "regression")
    figure, panels = _create_panels(len(found))
    for axes, (label, part) in zip(panels, found.items(), strict=True):
        true, predicted = part.targets[:, 0], part.values[RUN][:, 0]
        for number, site in enumerate(dict.fromkeys(part.sites.tolist())):
            rows = part.sites == site
            axes.scatter(true[rows], predicted[rows], s=14, alpha=0.7, color=f"C{number % 8}", label=site)
        ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]
        axes.plot(ends, ends, color="0.4", linewidth=1, linestyle="--")
        axes.set(title=label, xlabel="true value", ylabel="predicted value")
    if len(panels[0].collections) <= 10:
        panels[-1].legend(fontsize=8)
    return figure


def draw_risks(runs: list[RunResult]) -> Figure:
    """Draw the ROC curve of each run, and how often the event occurs among subjects of similar predicted risk."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    for number, (label, part) in enumerate(select_predictions(runs, "binary").items()):
        risk, classes = (torch.from_numpy(values[:, -1]) for values in (part.values[RUN], part.targets))
        auc = part.pooled.get("auc")
        name = label if auc is None else f"{label}: auc_across_sites {auc:.3f}"
        left.plot(*find_curve(risk, classes), label=name, **get_line_style(number))
        counts, mean_risk, share = (values.numpy() for values in bin_risks(risk, classes))
        right.plot(mean_risk, share, label=label, **get_line_style(number))
        right.scatter(mean_risk, share, s=12 + 120 * counts / counts.sum(), color=get_line_style(number)["color"])
    for axes in (left, right):
        axes.plot([0, 1], [0, 1], color="0.4", linewidth=1, linestyle="--")
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    left.set(xlabel="share of class 0 called 1 (1 - specificity)", ylabel="share of class 1 found (sensitivity)")
    right.set(xlabel="mean predicted risk", ylabel="observed share of class 1")
    left.set_title("ROC")
    right.set_title("Calibration")
    left.legend(loc="lower right", fontsize=9)
    return figure


def draw_survival(runs: list[RunResult]) -> Figure:
    """Draw survival by Kaplan and Meier of the test subjects with lower and with higher predicted risk, by run.

    Where a model predicts probabilities at times, their means over all subjects stand beside what was observed.
    """
    found = select_predictions(runs, "survival")
    figure, panels = _create_panels(len(found))
    configs = {run.label: run.config for run in runs}
    for axes, (label, part) in zip(panels, found.items(), strict=True):
        times, events = torch.from_numpy(part.targets).unbind(dim=1)
        risk, moments = part.values[RUN][:, -1], torch.cat([torch.zeros(1, dtype=times.dtype), times.unique()])
        is_high = torch.from_numpy(risk > _compute_medians(risk, part.sites if RUN in part.site_models else None))
        for name, rows, colour in (("lower risk", ~is_high, "C2"), ("higher risk", is_high, "C1")):
            if bool(rows.any()):
                curve = estimate_survival(times[rows], events[rows], moments)
                axes.step(moments, curve, where="post", color=colour, label=f"{name} ({int(rows.sum())})")
        ends = torch.tensor(configs[label].get("task", {}).get("times") or [], dtype=times.dtype)
        if len(ends) and len(ends) == part.values[RUN].shape[1] - 1:
            axes.plot(moments, estimate_survival(times, events, moments), color="0.6", label="all, observed")
            axes.plot(ends, part.values[RUN][:, :-1].mean(axis=0), "o", color="0.2", label="all, predicted")
        axes.set(title=label, xlabel="time", ylabel="share without an event", ylim=(-0.02, 1.02))
        axes.legend(fontsize=8)
    return figure


def _compute_medians(risk: np.ndarray, sites: np.ndarray | None) -> np.ndarray:
    """Return the median of all risks for each subject; that of the subject's site where sites have models of theirs."""
    groups = np.zeros(len(risk), dtype=np.int64) if sites is None else np.unique(sites, return_inverse=True)[1]
    return np.array([np.median(risk[groups == group]) for group in range(groups.max() + 1)])[groups]


def _create_panels(number: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with panels of equal size, three in a row."""
    columns = min(number, 3) if number > 1 else 1
    rows = -(-number // columns)
    size = (6.2, 4.6) if number == 1 else (10, 3.7 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    panels = list(axes.flat)
    for unused in panels[number:]:
        unused.remove()
    return figure, panels[:number]


def draw_sweep(
    content: tuple[Sequence[SettingsResult], Sequence[Mapping[str, Any]], str],
) -> Figure:
    """Draw ranked settings, a row each, best on top: a dot for each seed, a bar for their mean.

    Below, where methods were compared, the paired difference of each from the first, with its 95 % interval.

    Args:
        content: the settings, the methods and the metric.
    """
    ranked, methods, metric = content
    compared = [row for row in methods if row["difference"]]
    heights = [1.2 + 0.35 * len(ranked), *([1.2 + 0.35 * len(compared)] if compared else [])]
    size = (8, sum(heights))
    figure, grid = plt.subplots(len(heights), figsize=size, height_ratios=heights, squeeze=False, layout="constrained")
    axes, *below = grid[:, 0]
    for row, result in enumerate(ranked):
        values = list(result.validation.values())
        axes.plot(values, [row] * len(values), "o", color="C0", alpha=0.6)
        if result.mean is not None:
            axes.plot([result.mean], [row], "|", color="C1", markersize=16, markeredgewidth=2)
    axes.set_yticks(range(len(ranked)), [_label(result) for result in ranked])
    axes.invert_yaxis()
    axes.set(xlabel=f"{metric} on validation examples", title="Settings, best first")
    for place in below:
        for row, found in enumerate(compared):
            value, low, high = (found["difference"][name] for name in ("value", "low", "high"))
            place.errorbar([value], [row], xerr=[[value - low], [high - value]], fmt="o", color="C0", capsize=3)
        place.axvline(0, color="0.5", linewidth=1)
        place.set_yticks(range(len(compared)), [row["method"] for row in compared])
        place.invert_yaxis()
        name = f"{methods[0]['metric']}: difference from {methods[0]['method']}"
        place.set(xlabel=f"{name}, same subjects, 95 %")
    return figure


def _label(result: SettingsResult) -> str:
    failed = f" ({len(result.failed)} failed)" if result.failed else ""
    return ", ".join(result.settings) + failed
