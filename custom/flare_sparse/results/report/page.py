"""Self-contained HTML report: works offline, in print and on a phone."""

import base64
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..runs.comparison import describe_runs
from ..runs.record import CONFIG
from ..runs.results import RunResult, group_by_seed
from . import figures
from .attacks import build_attacks
from .findings import build_comparisons, describe_caveat, describe_findings, describe_sites
from .tables import (
    build_cohorts,
    build_contributions,
    build_evaluations,
    build_events,
    build_matrices,
    build_metrics,
    build_privacy,
    build_runs,
    build_seed_averages,
    build_sizes,
    build_subgroups,
    describe_means,
)
from .templates import fill_template

Runs = list[RunResult]
FIGURES: dict[str, tuple[Callable[[Runs], Figure], Callable[[Runs], bool]]] = {
    "learning": (figures.draw_learning_curves, lambda runs: any(run.learning_curve for run in runs)),
    "traffic": (figures.draw_traffic, bool),
    "sites": (figures.draw_sites, lambda runs: any(run.site_metrics for run in runs)),
    "predicted": (figures.draw_predicted, lambda runs: bool(figures.select_predictions(runs, "regression"))),
    "risks": (figures.draw_risks, lambda runs: bool(figures.select_predictions(runs, "binary"))),
    "survival": (figures.draw_survival, lambda runs: bool(figures.select_predictions(runs, "survival"))),
    "cases": (figures.draw_cases, lambda runs: bool(runs[0].pictures)),
    "layers": (figures.draw_layer_densities, lambda runs: any(map(figures.has_sparse_layers, runs))),
}
"""What draws a figure of some runs, and whether they have the data that it shows, by name of its PNG file.

Titles and captions are in ``page.html.jinja``.
"""
OF_SUBJECTS = {"predicted", "risks", "survival", "cases"}
"""Figures with images of subjects, or a mark or step for each of them."""


def write_report(runs: Runs, out: Path, *, pictures: bool = True) -> list[Path]:
    """Write ``report.html`` and its figures as PNG files.

    Args:
        runs: runs to compare; they share one metric.
        out: folder to write to; created if missing.
        pictures: whether the page may contain images of subjects.

    Returns:
        The files written, the page first.
    """
    out.mkdir(parents=True, exist_ok=True)
    page, images = out / "report.html", {}
    for name, (draw, applies) in FIGURES.items():
        # An earlier report may have drawn single subjects.
        (out / f"{name}.png").unlink(missing_ok=True)
        if applies(runs) and (pictures or name not in OF_SUBJECTS):
            images[name] = embed_figure(figures.render_png(draw, runs), out / f"{name}.png")
    page.write_text(
        fill_template("report/page.html.jinja", {**_build_content(runs), "figures": images}), encoding="utf-8"
    )
    return [page, *(out / f"{name}.png" for name in images)]


def embed_figure(data: bytes, file: Path) -> dict[str, Any]:
    """Write a PNG file, and return it as a template shows it."""
    file.write_bytes(data)
    # The first chunk of a PNG file holds its width and height.
    width, height = struct.unpack(">II", data[16:24])
    return {"width": width, "height": height, "data": base64.b64encode(data).decode()}


def _build_content(runs: Runs) -> dict[str, Any]:
    """Return the variables of the template."""
    first, labels = runs[0], ", ".join(label for label, _ in group_by_seed(runs))
    compared = describe_runs(runs, {})
    build_first = build_runs, build_seed_averages, build_subgroups
    build_second = build_metrics, build_cohorts, build_contributions
    build_last = build_evaluations, build_sizes, build_privacy, build_attacks, build_events
    return {
        "title": first.summary["name"] if len(runs) == 1 else f"{len(runs)} runs: {labels}",
        "subtitle": _describe_runs(runs),
        "findings": describe_findings(runs, compared),
        "caveat": describe_caveat(runs),
        "runs": [(run, _read_config(run)) for run in runs],
        "tables": [
            *(build(runs) for build in build_first),
            *build_comparisons(compared),
            *(build(runs) for build in build_second),
        ],
        "means": describe_means(runs),
        "missing_predictions": figures.explain_missing_predictions(runs),
        "matrices": build_matrices(runs),
        "last_tables": [build(runs) for build in build_last],
    }


def _describe_runs(runs: Runs) -> str:
    """Return method, sites and length of a run, or the sites of several; when they ended, and whether data is real."""
    first, ended = runs[0], max(run.times[1] for run in runs)
    names = {site for run in runs for site in run.sites}
    what = f"{first.summary['method']}, {describe_sites(first)}, {first.summary['rounds']} rounds"
    what = what if len(runs) == 1 else f"{len(names)} sites; metric: {first.metric_label}"
    synthetic = "; synthetic data, of no patients" if any(run.is_synthetic for run in runs) else ""
    return f"{what}; ended {ended:%Y-%m-%d %H:%M} UTC{synthetic}"


def _read_config(run: RunResult) -> str:
    file = run.path / CONFIG
    return file.read_text(encoding="utf-8") if file.is_file() else "config.yaml is missing"
