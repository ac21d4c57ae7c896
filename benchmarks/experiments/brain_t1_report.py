"""Update docs/results/age.md from the files of ``brain_t1.py``, which calls this with ``--docs``.

The text above the tables is kept.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from page_tables import write_section
from runs import compare_scores

from flare_sparse.results.runs.bootstrap import Difference, compute_r2_within_sites
from flare_sparse.results.runs.progress import format_bytes

mpl.use("Agg")
import matplotlib.pyplot as plt

plt.style.use("flare_sparse.results.report.plots")

ROOT = Path(__file__).resolve().parents[2]
PLOT = ROOT / "docs" / "images" / "result.png"
NAMES = ("error", "sites", "differences", "densities", "live", "methods", "uniform", "skewed", "sex")
"""Names of the tables, which are files of their own."""
SITES = ("IXI-HH-1", "IXI-HH-2", "IXI-HH-3", "IXI-HH-4", "NSK")
LINEAR = {
    "site_mean": "site mean",
    "ridge_local": "ridge, each site",
    "ridge_pooled": "ridge, pooled",
    "logistic_local": "logistic, each site",
    "logistic_pooled": "logistic, pooled",
}
LEVELS = (90, 95, 98, 99)
PAIRS = (
    ("FedAvg", "local only"),
    ("FedAvg", "ridge, each site"),
    ("FedAvg", "ridge, pooled"),
    ("FedAvg", "pooled"),
    *((f"{method} {level} %", other) for method in ("NeuroSFL", "FedSparsify") for level in (90, 95)
      for other in ("FedAvg", "local only", "ridge, each site")),
    *((f"NeuroSFL {level} %", "FedAvg") for level in (98, 99)),
)  # fmt: skip
MASKS = tuple(
    (f"{first} {level} %", f"{second} {level} %")
    for level in LEVELS
    for first, second in (("NeuroSFL", "shuffled SNIP"), ("shuffled SNIP", "random mask"))
)
MORE = {
    "methods": ("Variants of SNIP and other methods", "years", 1, "FedAvg", "NeuroSFL {level}"),
    "uniform": ("FedSparsify: eight sites of equal size, ages mixed", "years", 1, "FedAvg", "local only"),
    "skewed": (
        "FedSparsify: eight sites of skewed size, each with its own range of ages",
        "years",
        1,
        "FedAvg",
        "local only",
    ),
    "sex": ("Sex, five sites", "% of subjects", 100, "FedAvg", "local only"),
    "cnn": ("3D convolutions", "years", 1, "FedAvg, MLP", "pooled, MLP"),
}
"""Title, unit of the error, its factor, and the arms compared with, by table."""
Key = tuple[str, int, int]
"""Site, subject and seed."""


@dataclass
class Arm:
    """The finished runs of one arm.

    Attributes:
        tests: age and prediction of each test of a subject.
        runs: contents of the files.
    """

    tests: dict[Key, tuple[float, float]] = field(default_factory=dict)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def compute_errors(self, keys: Collection[Key]) -> tuple[np.ndarray, np.ndarray]:
        """Return each subject's mean absolute error over some tests, and its site, both ``(n,)``."""
        errors: dict[tuple[str, int], list[float]] = {}
        for site, subject, seed in sorted(keys):
            age, prediction = self.tests[site, subject, seed]
            errors.setdefault((site, subject), []).append(abs(prediction - age))
        return np.array([np.mean(values) for values in errors.values()]), np.array([site for site, _ in errors])


def read_arms(folder: Path, table: str = "") -> dict[str, Arm]:
    """Return the arms of the main tables, or of one with one fold a seed, by label, linear models among them."""
    arms: dict[str, Arm] = {}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text())
        if run.get("table", "") != table:
            continue
        names = {"run": run["label"]} if "run" in run["subjects"][0] else LINEAR
        for key, label in names.items():
            if key not in run["subjects"][0]:
                continue
            arm = arms.setdefault(label, Arm())
            arm.runs.append(run)
            arm.tests |= {(s["site"], s["subject"], run["seed"]): (s["age"], s[key]) for s in run["subjects"]}
    return arms


def compare(arms: Mapping[str, Arm], first: str, second: str) -> tuple[Difference, int] | None:
    """Return the paired difference of two arms over the tests that both have, and the subjects; None without any."""
    keys = arms[first].tests.keys() & arms[second].tests.keys() if {first, second} <= arms.keys() else set()
    if not keys:
        return None
    (own, sites), (other, _) = (arms[label].compute_errors(keys) for label in (first, second))
    return compare_scores(own, other, sites, is_lower_better=True), len(sites)


def format_arm(label: str, arm: Arm) -> str:
    """Return a row: tests, error with its interval and by seed, R2 within sites, bytes."""
    errors, sites = arm.compute_errors(arm.tests)
    interval = compare_scores(errors, np.zeros_like(errors), sites, is_lower_better=True)
    by_seed, r2 = [], []
    for seed in sorted({seed for _, _, seed in arm.tests}):
        keys = sorted(key for key in arm.tests if key[2] == seed)
        values = np.array([arm.tests[key] for key in keys])
        by_seed.append(f"{arm.compute_errors(keys)[0].mean():.2f}")
        r2.append(compute_r2_within_sites(values[:, 1:], values[:, :1], np.array([site for site, _, _ in keys])) or 0.0)
    sent = [run["bytes"] for run in arm.runs if "bytes" in run]
    less = [run["dense_bytes"] / run["bytes"] for run in arm.runs if "bytes" in run]
    cells = [
        f"{len(errors)}, {len(arm.tests)}",
        f"**{errors.mean():.2f}** [{interval.low:.2f}, {interval.high:.2f}]",
        " ".join(by_seed),
        f"{np.mean(r2):.2f}",
        format_bytes(float(np.mean(sent))) if sent else "-",
        f"{np.mean(less):.1f}x" if sent else "-",
    ]
    return f"| {label} | " + " | ".join(cells) + " |"


def format_sites(label: str, arm: Arm) -> str:
    """Return a row: error by site."""
    errors, sites = arm.compute_errors(arm.tests)
    return f"| {label} | " + " | ".join(f"{errors[sites == site].mean():.1f}" for site in SITES) + " |"


def format_difference(arms: Mapping[str, Arm], first: str, second: str) -> str | None:
    """Return a row: the difference in years and percent, its interval and verdict."""
    compared = compare(arms, first, second)
    if compared is None:
        return None
    difference, subjects = compared
    cells = [
        f"{first} minus {second}",
        str(subjects),
        f"{difference.value:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]",
        f"{difference.value / difference.second:+.1%}",
        difference.verdict,
        f"{difference.sites_that_gain:.0%}" if difference.sites_that_gain is not None else "-",
        f"{difference.worst_site.removeprefix('IXI-')} ({difference.by_site[difference.worst_site]:+.2f})",
    ]
    return "| " + " | ".join(cells) + " |"


def format_live(arms: Mapping[str, Arm], label: str) -> str | None:
    """Return a row: live weights of each layer on average, and the share of the first one's on voxels that vary."""
    if label not in arms:
        return None
    counts: dict[str, list[list[int]]] = {}
    for run in arms[label].runs:
        for name, numbers in run["live"].items():
            counts.setdefault(name, []).append(numbers)
    means = {name: np.mean(numbers, axis=0) for name, numbers in counts.items()}
    inside, _ = means.pop("inside the brain")
    (first, first_size), (last, last_size) = means.values()
    errors = arms[label].compute_errors(arms[label].tests)[0]
    return (
        f"| {label} | {len(arms[label].runs)} | {errors.mean():.2f} | {first:.0f} of {first_size:.0f} | "
        f"{inside / first:.0%} | {last:.0f} of {last_size:.0f} |"
    )


def format_more(folder: Path, table: str, labels: Sequence[str]) -> list[str]:
    """Return the lines of a table with one fold a seed; empty without runs."""
    own = read_arms(folder, table)
    title, unit, scale, *references = MORE[table]
    shown = [label for label in (*LINEAR.values(), *labels) if label in own]
    if not shown:
        return []
    # Only the tests that both have are compared, so that arms with five folds are no different from the others.
    arms = read_arms(folder) | own if table == "methods" else own
    tests = max((own[label].tests for label in shown), key=len)
    counts = f"{len({key[:2] for key in tests})} subjects, {len(tests)} tests."
    head = ["", f"error, {unit} [95 %]", *(f"minus {label}" for label in references), "sent"]
    rows = []
    for label in shown:
        errors, sites = own[label].compute_errors(own[label].tests)
        interval = compare_scores(scale * errors, np.zeros_like(errors), sites, is_lower_better=True)
        sent = [run["bytes"] for run in own[label].runs if "bytes" in run]
        level = " ".join(label.rsplit(" ", 2)[1:])
        cells = [
            f"**{interval.first:.2f}** [{interval.low:.2f}, {interval.high:.2f}]",
            *(format_short(compare(arms, label, name.format(level=level)), scale) for name in references),
            format_bytes(float(np.mean(sent))) if sent else "-",
        ]
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return [
        "",
        f"### {title}",
        "",
        counts,
        "",
        *build_table([name.format(level="at that level") for name in head], rows),
    ]


def format_short(compared: tuple[Difference, int] | None, scale: float) -> str:
    """Return a difference with its interval, bold where that excludes 0."""
    if compared is None or compared[0].first == compared[0].second:
        return ""
    value, low, high = (scale * figure for figure in (compared[0].value, compared[0].low, compared[0].high))
    text = f"{value:+.2f} [{low:+.2f}, {high:+.2f}]"
    return text if compared[0].verdict == "undecided" else f"**{text}**"


def update_docs(folder: Path, main: Sequence[str], ladder: Sequence[str], more: Mapping[str, Sequence[str]]) -> None:
    """Write the tables of the page from the finished runs in ``folder``."""
    arms = read_arms(folder)
    order = [label for label in (*LINEAR.values(), *main, *ladder) if label in arms]
    head = ["", "subjects, tests", "error, years [95 %]", "by seed", "R2 within sites", "sent", "less"]
    site_head = ["years", *(site.removeprefix("IXI-") for site in SITES)]
    pair_head = ["", "subjects", "years [95 %]", "share", "verdict", "sites that gain", "worst site"]
    live_head = ["", "runs", "error, years", "first layer", "of these in the brain", "last layer"]
    masks = [f"{name} {level} %" for level in LEVELS for name in ("NeuroSFL", "shuffled SNIP", "random mask")]
    lines = [
        "## Error and bytes",
        "",
        *build_table(head, [format_arm(label, arms[label]) for label in order]),
        "",
        *build_table(site_head, [format_sites(label, arms[label]) for label in order]),
        "",
        "## Paired differences",
        "",
        *build_table(pair_head, [format_difference(arms, *pair) for pair in PAIRS]),
        "",
        "## Densities or choices",
        "",
        *build_table(pair_head, [format_difference(arms, *pair) for pair in MASKS]),
        "",
        *build_table(live_head, [format_live(arms, label) for label in masks]),
        "",
        "## More methods, one fold a seed",
        "",
        "`minus` is the paired difference over the tests that both arms have, bold where its interval excludes 0.",
        *(line for table, labels in more.items() for line in format_more(folder, table, labels)),
    ]
    plot_errors(arms, [label for label in main if label in arms], PLOT)
    write_section("age", "brain_t1", "\n".join(lines), dict(enumerate(NAMES, start=1)))


def plot_errors(arms: Mapping[str, Arm], labels: Sequence[str], path: Path) -> None:
    """Draw the error by round and by bytes sent, mean over the runs of an arm."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for label in labels:
        curves = [run["curve"] for run in arms[label].runs if "curve" in run]
        if not curves:
            continue
        sent, errors = np.mean(np.array(curves), axis=0).T
        left.plot(range(1, len(errors) + 1), errors, label=label)
        right.plot(sent / 1e6, errors, label=label)
    left.set(xlabel="rounds", ylabel="test error: MAE, years", ylim=(5, 15))
    right.set(xlabel="MB sent so far, all sites, both ways", xscale="log")
    left.legend()
    figure.suptitle("Brain age from T1w MRI, five sites, real data: error and bytes")
    figure.savefig(path)
    plt.close(figure)


def build_table(head: Sequence[str], rows: Sequence[str | None]) -> list[str]:
    """Return the lines of a Markdown table; rows without runs are left out."""
    return ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *(row for row in rows if row)]
