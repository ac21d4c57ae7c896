"""Self-contained HTML report: works offline, in print and on a phone."""

import base64
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from matplotlib.figure import Figure

from ..runs.progress import format_bytes
from ..runs.record import CONFIG
from ..runs.results import RunResult, compute_site_gains, group_by_seed, label_groups
from . import figures
from .attacks import build_attacks
from .findings import build_comparisons, build_group_comparisons, describe_caveat, describe_findings, describe_sites
from .tables import (
    build_cohorts,
    build_contributions,
    build_evaluations,
    build_events,
    build_matrices,
    build_metrics,
    build_privacy,
    build_seed_averages,
    build_sizes,
    build_subgroups,
    compare_bytes,
    describe_means,
    format_metric,
)
from .templates import fill_template

TRAFFIC_CAPTION = (
    "Dense FedAvg: the bytes that it would have sent instead of each message. Floor: the values in their number format "
    "plus the entropy of the selection of entries, given what the receiver holds; no encoding of the same updates can "
    "be shorter. The difference between sent and floor is headers, padding and the encoding of the selection."
)

PEOPLE = "Made from predictions of single subjects, which are on this machine: --plain leaves the figure out."


@dataclass(frozen=True)
class ReportFigure:
    """A figure of the report.

    Attributes:
        name: name of the PNG file without its suffix.
        title: heading above the figure.
        caption: text below the figure.
        draw: draws the figure of some runs.
        applies: whether the runs have the data that the figure shows.
        shows_subjects: whether the figure contains images of subjects, or a mark or step for each of them.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[list[RunResult]], Figure]
    applies: Callable[[list[RunResult]], bool] = lambda runs: True
    shows_subjects: bool = False


FIGURES = (
    ReportFigure(
        "learning",
        "Quality",
        "Left: by round. Right: by bytes sent; further left is cheaper. A round evaluates the model it starts from.",
        figures.draw_learning_curves,
        lambda runs: any(run.learning_curve for run in runs),
    ),
    ReportFigure("traffic", "Bytes", TRAFFIC_CAPTION, figures.draw_traffic),
    ReportFigure(
        "sites",
        "Sites",
        "Each dot is the metric on one site's own test examples.",
        figures.draw_site_metrics,
        lambda runs: any(run.site_metrics for run in runs),
    ),
    ReportFigure(
        "gains",
        "Gain over training alone",
        "Each site's final metric compared with training alone, with the same seed and the same test examples.",
        figures.draw_gains,
        lambda runs: bool(compute_site_gains(runs)),
    ),
    ReportFigure(
        "predicted",
        "Predicted and true",
        f"Final model; each dot is a test example, the dashed line a perfect prediction. {PEOPLE}",
        figures.draw_predicted,
        lambda runs: bool(figures.select_predictions(runs, "regression")),
        shows_subjects=True,
    ),
    ReportFigure(
        "risks",
        "Predicted risk",
        "Final model on the test examples of all sites. Left: each point of a curve is a threshold of the risk; "
        "dashed: chance. Right: examples in ten bins of equal width, a dot's size is their number; below the dashed "
        f"line the risk is too high, above it too low. {PEOPLE}",
        figures.draw_risks,
        lambda runs: bool(figures.select_predictions(runs, "binary")),
        shows_subjects=True,
    ),
    ReportFigure(
        "survival",
        "Survival by predicted risk",
        "Kaplan-Meier estimates of the test subjects whose predicted risk is up to the median, and above it; in "
        f"brackets their number. Dots: the mean predicted probability, beside what was observed. {PEOPLE}",
        figures.draw_survival,
        lambda runs: bool(figures.select_predictions(runs, "survival")),
        shows_subjects=True,
    ),
    ReportFigure(
        "cases",
        "Cases",
        "Best, median and worst test case of each site; outlines: labels (solid) and prediction (dashed), a colour for "
        "each class. This page contains images of subjects: --plain leaves them out.",
        figures.draw_cases,
        lambda runs: bool(runs[0].pictures),
        shows_subjects=True,
    ),
    ReportFigure(
        "layers",
        "Sparsity",
        "Share of live entries of each weight tensor in the final model.",
        figures.draw_layer_densities,
        lambda runs: any(run.layer_densities and min(run.layer_densities.values()) < 1 for run in runs),
    ),
)


def write_report(runs: list[RunResult], out: Path, *, pictures: bool = True) -> list[Path]:
    """Write ``report.html`` and its figures as PNG files.

    Args:
        runs: runs to compare; they share one metric.
        out: folder to write to; created if missing.
        pictures: whether the page may contain images of subjects.

    Returns:
        The files written, the page first.
    """
    out.mkdir(parents=True, exist_ok=True)
    files, images = [], []
    for figure in FIGURES:
        if not figure.applies(runs) or (figure.shows_subjects and not pictures):
            continue
        data = figures.render_png(figure.draw, runs)
        files.append(out / f"{figure.name}.png")
        files[-1].write_bytes(data)
        caption = f"{figure.caption} {describe_means(runs)}" if figure.name == "learning" else figure.caption
        alt = f"{figure.title} of {', '.join(run.label for run in runs)}: the tables of this page list the values"
        images.append(embed_figure(data, figure.title, caption, alt))
    page = out / "report.html"
    page.write_text(
        fill_template("report/page.html.jinja", {**_build_content(runs), "figures": images}), encoding="utf-8"
    )
    return [page, *files]


def embed_figure(data: bytes, title: str, caption: str, alt: str) -> SimpleNamespace:
    """Return a PNG file as a template shows it."""
    # The first chunk of a PNG file holds its width and height.
    width, height = struct.unpack(">II", data[16:24])
    encoded = base64.b64encode(data).decode()
    return SimpleNamespace(title=title, caption=caption, alt=alt, width=width, height=height, data=encoded)


def _build_content(runs: list[RunResult]) -> dict[str, Any]:
    """Return the variables of the template."""
    first, labels = runs[0], ", ".join(label_groups(group_by_seed(runs)))
    return {
        "title": first.summary["name"] if len(runs) == 1 else f"{len(runs)} runs: {labels}",
        "subtitle": _describe_runs(runs),
        "findings": describe_findings(runs),
        "caveat": describe_caveat(runs),
        "metric": first.metric_label,
        "cards": _build_cards(first),
        "runs": [SimpleNamespace(label=r.label, summary=r.summary, config=_read_config(r)) for r in runs],
        "rows": [_build_run_row(run) for run in runs],
        "averages": build_seed_averages(runs),
        "metrics": build_metrics(runs),
        "comparisons": [
            table for table in (build_subgroups(runs), build_comparisons(runs), build_group_comparisons(runs)) if table
        ],
        "means": describe_means(runs),
        "cohorts": build_cohorts(first),
        "contributions": build_contributions(runs),
        "missing_predictions": figures.explain_missing_predictions(runs),
        "evaluations": build_evaluations(runs),
        "matrices": build_matrices(runs),
        "sizes": build_sizes(runs),
        "privacy": build_privacy(runs),
        "attacks": build_attacks(runs),
        "events": build_events(runs),
    }


def _describe_runs(runs: list[RunResult]) -> str:
    """Return method, sites and length of a run, or the sites of several; when they ended, and whether data is real."""
    first, ended = runs[0], max(run.times[1] for run in runs)
    names = {site for run in runs for site in run.sites}
    what = f"{first.summary['method']}, {describe_sites(first)}, {first.summary['rounds']} rounds"
    what = what if len(runs) == 1 else f"{len(names)} sites; metric: {first.metric_label}"
    synthetic = "; synthetic data, of no patients" if any(run.is_synthetic for run in runs) else ""
    return f"{what}; ended {ended:%Y-%m-%d %H:%M} UTC{synthetic}"


def _build_cards(run: RunResult) -> list[tuple[str, str]]:
    return [
        (format_metric(run.final_metric), f"{run.metric_label}, all sites"),
        (format_bytes(run.sum_directions("payload_bytes")), "sent"),
        (_format_reduction(run), "than dense FedAvg"),
        (f"{100 * run.summary['sparsity']:.1f} %", "of the entries off"),
    ]


def _build_run_row(run: RunResult) -> SimpleNamespace:
    best, worst, dense_bytes = run.summary["best"], run.worst_site, run.sum_directions("dense_bytes")
    return SimpleNamespace(
        label=run.label,
        final=format_metric(run.final_metric),
        worst=f"{format_metric(worst[1])} ({worst[0]})" if worst else "-",
        best=f"{format_metric(best['metrics'].get(run.metric))} ({best['round']})" if best["round"] >= 0 else "-",
        sent=format_bytes(run.sum_directions("payload_bytes")),
        dense=format_bytes(dense_bytes) if dense_bytes else "-",
        reduction=_format_reduction(run),
        floor=format_bytes(run.sum_directions("floor_bytes")),
        sparsity=f"{100 * run.summary['sparsity']:.1f} %",
        rounds=run.summary["rounds"],
        seed=run.summary["seed"],
        seconds=f"{run.summary['seconds']:.0f}",
    )


def _read_config(run: RunResult) -> str:
    file = run.path / CONFIG
    return file.read_text(encoding="utf-8") if file.is_file() else "config.yaml is missing"


def _format_reduction(run: RunResult) -> str:
    return compare_bytes(run.sum_directions("payload_bytes"), run.sum_directions("dense_bytes"))
