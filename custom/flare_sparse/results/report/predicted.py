"""Figures of what the models predict for the test subjects: against the truth, as risks, and over time.

They need the predictions of :mod:`flare_sparse.results.runs.predictions`, which exist only where the data of the sites
is. Their metrics are those of the record; nothing is measured here.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...core.ranking import bin_risks, estimate_survival, find_curve
from ...tasks.task import Kind
from ..runs.predictions import RUN, Predictions
from ..runs.results import RunResult
from .figures import get_line_style

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
    if all(run.config.get("simulator") is None for run in runs if run.predictions is None):
        return (
            f"No predictions of {', '.join(lacking)} are shown (against the truth, ROC, survival, calibration): a site "
            "of a federation sends metrics, as its policy allows, and no prediction of a person."
        )
    return (
        f"No predictions of {', '.join(lacking)} are shown (against the truth, ROC, survival, calibration): "
        "flare-sparse report computes them where the data of all sites is, without --plain."
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
