"""Tables of the report and the model card: contributions, all metrics, models by site, means over seeds, subgroups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from ...rounds.federation.records import Participation
from ...tasks.task import PARTS, TEST_EXAMPLES
from ..runs.progress import compare_with_dense, format_bytes
from ..runs.results import RunResult, group_by_seed
from ..runs.subgroups import find_largest_gap, pool_subgroups

NO_TESTS = "no test examples"
WAYS = ("dense", "sparse", "compact")
"""Ways to compute a network, as :func:`flare_sparse.results.runs.cost.measure_cost` names them."""
NOT_COUNTED = "not counted"
"""In place of a number of test examples, where metrics come without it, as a training script may send them."""
OUTCOMES: dict[str, tuple[str, Callable[[np.ndarray], str]]] = {
    "regression": ("true value in the test: mean ± SD", lambda targets: f"{targets.mean():.3g} ± {targets.std():.2g}"),
    "binary": ("class 1 in the test", lambda targets: f"{targets.sum():.0f} ({targets.mean():.0%})"),
    "survival": ("events in the test", lambda targets: f"{targets[:, 1].sum():.0f} ({targets[:, 1].mean():.0%})"),
}
"""Title of the column of outcomes and text of the targets ``(n, t)`` of a cohort, by kind."""


@dataclass(frozen=True)
class ReportTable:
    """A table as text.

    Attributes:
        title: heading.
        columns: heads of the columns; the first one is left-aligned.
        rows: cells by row.
        note: text below the table.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    @property
    def markdown(self) -> str:
        """The table in Markdown; a bar within a cell, which would end it, becomes a slash."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)


def format_metric(value: float | None) -> str:
    """Format a metric with three decimals; None becomes a dash."""
    return "-" if value is None else f"{value:.3f}"


def format_interval(value: float | None, bounds: Sequence[float] | None) -> str:
    """Format a metric with its interval, if it has one, in brackets."""
    return f"{format_metric(value)} [{bounds[0]:.3f}, {bounds[1]:.3f}]" if bounds else format_metric(value)


def compare_bytes(sent: float, dense: float) -> str:
    """Return how many times fewer or more bytes were sent than dense FedAvg sends, such as ``12.3x less``."""
    if not dense or not sent:
        return "-"
    return compare_with_dense(sent, dense).removesuffix(" than dense").removesuffix(" as dense")


def build_runs(runs: Sequence[RunResult]) -> ReportTable:
    """Return quality, bytes and length of each run."""
    columns = ["run", runs[0].metric_label, "worst site", "best round", "sent", "dense FedAvg", "than dense", "floor"]
    rows = []
    for run in runs:
        summary, best, worst = run.summary, run.summary["best"], run.worst_site
        sent, dense, floor = (run.sum_directions(f"{name}_bytes") for name in ("payload", "dense", "floor"))
        row = [
            run.label,
            format_metric(run.final_metric),
            f"{format_metric(worst[1])} ({worst[0]})" if worst else "-",
            f"{format_metric(best['metrics'].get(run.metric))} ({best['round']})" if best["round"] >= 0 else "-",
            format_bytes(sent),
            format_bytes(dense) if dense else "-",
            compare_bytes(sent, dense),
            format_bytes(floor),
        ]
        rest = f"{100 * summary['sparsity']:.1f} %", summary["rounds"], summary["seed"], f"{summary['seconds']:.0f}"
        rows.append([*row, *map(str, rest)])
    return ReportTable("The runs", [*columns, "final sparsity", "rounds", "seed", "seconds"], rows)


def build_cohorts(runs: Sequence[RunResult]) -> ReportTable:
    """Return the examples of each site of the first run; outcomes of test subjects whose data is on this machine."""
    run = runs[0]
    cohorts, predictions = run.cohorts, run.predictions
    rows = [[site, *("-" if counts[p] is None else str(counts[p]) for p in PARTS)] for site, counts in cohorts.items()]
    rows.append(["all sites", *(str(sum(counts[p] or 0 for counts in cohorts.values())) for p in PARTS)])
    columns = ["site", "training examples", "validation", "test"]
    if predictions is not None and predictions.kind in OUTCOMES:
        title, describe = OUTCOMES[predictions.kind]
        columns.append(title)
        for row in rows:
            is_total = row is rows[-1]
            targets = predictions.targets[np.full(len(predictions.sites), is_total) | (predictions.sites == row[0])]
            row.append(describe(targets) if len(targets) else "-")
    note = f"Of {run.label}, as the sites reported them. A dash: none, or not reported."
    return ReportTable("Cohorts", columns, rows, note)


def build_contributions(runs: Sequence[RunResult]) -> ReportTable:
    """Return in how many rounds each site contributed."""
    sites = sorted({site for run in runs for site in run.contributions})
    rows = [[site, *(_format_part(run.contributions.get(site)) for run in runs)] for site in sites]
    note = "Rounds in which a site's update was used, of those in which it was asked; evaluations are not counted."
    return ReportTable("Contributions", ["site", *(run.label for run in runs)], rows, note)


def _format_part(part: Participation | None) -> str:
    if part is None:
        return "-"
    if not part.expected:
        return "never asked"
    missed = f" ({part.describe_missed()})" if part.missed else ""
    return f"{part.contributed or 'none'} of {part.expected}{missed}"


def build_metrics(runs: Sequence[RunResult]) -> ReportTable:
    """Return all metrics of the final models over all sites."""
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names))
    overall = [run.summary["final"]["metrics"] for run in runs]
    rows = [[run.label, *(format_metric(m.get(n)) for n in names)] for run, m in zip(runs, overall, strict=True)]
    # The figure of the learning curves has the same note.
    note = "" if any(run.learning_curve for run in runs) else describe_means(runs)
    return ReportTable("All metrics", ["run", *names], rows, note)


def describe_means(runs: Sequence[RunResult]) -> str:
    """Return what a value over all sites is, which sites it lacks, and how the best model was selected."""
    missing = {}
    for run in runs:
        for site in run.sites:
            metrics = run.summary["final"]["sites"].get(site, {})
            absent = [name for name in run.metric_names if name not in metrics]
            if absent:
                missing[site] = "all" if len(absent) == len(run.metric_names) else ", ".join(absent)
    explanation = (
        "Values over all sites are means of the sites' values, weighted by test examples. For means over examples, "
        "such as MAE and accuracy, that is the value over all examples; for AUC, C-index, F1 and RMSE it is not."
    )
    sentences = [explanation]
    if missing:
        listed = "; ".join(f"{site} ({names})" for site, names in sorted(missing.items()))
        sentences.append(f"Sites without a value, which are not in these means: {listed}.")
    if any(run.summary["best"]["round"] >= 0 for run in runs):
        sentences.append(
            "The best model was selected by its metric on validation examples; test examples choose nothing."
        )
    return " ".join(sentences)


def build_seed_averages(runs: list[RunResult]) -> ReportTable | None:
    """Return mean, standard deviation and range of runs that differ by seed only; None without such runs."""
    groups = group_by_seed(runs)
    if all(len(group) == 1 for _, group in groups):
        return None
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names))
    rows = []
    for label, group in groups:
        cells = []
        for name in names:
            values = [v for run in group if (v := run.summary["final"]["metrics"].get(name)) is not None]
            cells.append(_format_spread(values, with_range=name == names[0]))
        sent, dense = (mean(run.sum_directions(key) for run in group) for key in ("payload_bytes", "dense_bytes"))
        rows.append([label, str(len(group)), *cells, format_bytes(sent), compare_bytes(sent, dense)])
    columns = ["method", "seeds", *names, "sent", "than dense FedAvg"]
    note = "Mean ± standard deviation over seeds (n - 1); in brackets the smallest and the largest value."
    return ReportTable("Averages over seeds", columns, rows, note)


def _format_spread(values: Sequence[float], *, with_range: bool) -> str:
    if len(values) < 2:
        return format_metric(values[0] if values else None)
    limits = f" [{min(values):.3f}, {max(values):.3f}]" if with_range else ""
    return f"{mean(values):.3f} ± {stdev(values):.3f}{limits}"


def build_matrices(runs: Sequence[RunResult]) -> list[ReportTable]:
    """Return, for each metric, the values of every model (row) at every site (column)."""
    results = [run.cross_site.get("results", {}) for run in runs]
    sites = sorted({site for run, evaluated in zip(runs, results, strict=True) for site in [*run.sites, *evaluated]})
    rows = [(f"{run.label}: {label_model(name)}", values) for run in runs for name, values in _list_models(run)]
    heads = [f"{site} ({_count_tests(runs, site)})" for site in sites]
    own = (
        " flare-sparse evaluate RUN evaluates the sites' own models at every other site, where all data is on one "
        "machine."
    )
    note = f"In brackets: test examples of the site.{'' if any(results) else own}"
    tables = []
    for name in dict.fromkeys(name for run in runs for name in run.metric_names):
        cells = [[label, *(format_metric(values.get(site, {}).get(name)) for site in sites)] for label, values in rows]
        # A row without any value of this metric says nothing.
        if kept := [row for row in cells if set(row[1:]) != {"-"}]:
            tables.append(ReportTable(f"Models by site: {name}", ["model", *heads], kept, note))
    return tables


MODELS = {"own": "each site's own model", "final": "final model", "best": "best model"}
"""Models of a run that are no single site's, in the order of tables."""


def _list_models(run: RunResult) -> list[tuple[str, Mapping[str, Mapping[str, Any]]]]:
    """Return each model of a run with its metrics by site."""
    models = {"own" if run.personal_model else "final": dict(run.summary["final"]["sites"])}
    if run.best_site_metrics:
        models["best"] = dict(run.best_site_metrics)
    for site, values in run.cross_site.get("results", {}).items():
        for model, metrics in values.items():
            models.setdefault(model, {})[site] = metrics
    return [(name, models[name]) for name in dict.fromkeys([*MODELS, *sorted(models)]) if name in models]


def label_model(name: str) -> str:
    return MODELS.get(name, f"model of {name}")


def _count_tests(runs: Sequence[RunResult], site: str) -> str:
    figures = [run.summary["final"]["sites"].get(site, {}) for run in runs]
    counts = [run.cross_site.get("examples", {}).get(site) for run in runs]
    figures += [{TEST_EXAMPLES: count} for count in counts if count]
    return describe_tests(next((f for f in figures if f.get(TEST_EXAMPLES)), figures[0]))


def describe_tests(metrics: Mapping[str, float]) -> str:
    """Return the number of test examples among a site's metrics, or why there is none."""
    if metrics and TEST_EXAMPLES not in metrics:
        return NOT_COUNTED
    return f"{metrics[TEST_EXAMPLES]:.0f}" if metrics.get(TEST_EXAMPLES) else NO_TESTS


def build_evaluations(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return all metrics on the cohorts of ``flare-sparse evaluate``; None without any."""
    records = [(run, record) for run in runs for record in run.evaluations]
    if not records:
        return None
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names))
    names += sorted({name for _, record in records for name in record["metrics"]} - set(names))
    rows = [
        [str(record["cohort"]), f"{run.label}: {label_model(str(record['model']))}", f"{record['examples']}"]
        + [format_interval(record["metrics"].get(name), record.get("intervals", {}).get(name)) for name in names]
        for run, record in records
    ]
    notes = [f"{record['cohort']}: {note}" for _, record in records for note in record.get("notes", [])]
    text = "flare-sparse evaluate; in brackets the 95 % bootstrap interval over the cohort's examples."
    return ReportTable("Evaluated cohorts", ["cohort", "model", "examples", *names], rows, " ".join([text, *notes]))


def build_privacy(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return what each site's subjects have been charged; None if no run has differential privacy."""
    rows = []
    for run in runs:
        if (privacy := run.summary.get("privacy")) is None:
            continue
        budget = "-" if privacy["epsilon"] is None else f"{privacy['epsilon']:g}"
        for site, spent in privacy["spent"].items():
            outside = ", ".join(privacy["outside_budget"])
            rows.append([site, run.label, f"{spent:.2f}", budget, f"{privacy['delta']:g}", outside])
    columns = ["site", "run", "epsilon spent", "budget", "delta", "outside the budget"]
    note = (
        "Differential privacy of a subject of the site: what all messages of the run tell about its training examples "
        "is bounded by epsilon, except with probability delta."
    )
    return ReportTable("Privacy", columns, rows, note) if rows else None


def build_sizes(runs: Sequence[RunResult]) -> ReportTable:
    """Return bytes, live parameters and cost of a prediction of the final models."""
    columns = ["run", "bytes on disk", "live parameters", "of", *(f"MACs, {way}" for way in WAYS)]
    columns += [f"examples/s, {way}" for way in WAYS]
    rows = []
    for run in runs:
        size, ways = run.summary["model"], [run.cost.get(way, {}) for way in WAYS]
        macs = [f"{way['macs']:,}" if "macs" in way else "-" for way in ways]
        speeds = [f"{way['examples_per_second']:.0f}" if "examples_per_second" in way else "-" for way in ways]
        counts = [f"{size[name]:,}" for name in ("bytes", "live", "parameters")]
        rows.append([run.label, *counts, *macs, *speeds])
    note = (
        "MACs: multiply-accumulates of an example, as torch counts them. Sparse: of weights that are not zero, by this "
        "package's kernels. Compact: of the network without units that compute nothing. A dash: not measured, because "
        "the data is not on this machine, or no smaller network computes the same."
    )
    return ReportTable("Size of the model", columns, rows, note)


def build_events(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return what the runs recovered from, such as damaged checkpoints; None if nothing happened."""
    rows = [
        [str(event.get("site", "server")), run.label, str(event.get("round", "-")), str(event.get("event", "-")),
         str(event.get("detail", ""))]
        for run in runs
        for event in run.summary.get("events", [])
    ]  # fmt: skip
    columns = ["site", "run", "round", "event", "detail"]
    return ReportTable("Events", columns, rows, "What the run recovered from, or lost.") if rows else None


NOTE = (
    "Test subjects of the final model by subgroup: means over sites, weighted by their subjects of the subgroup; in "
    "brackets the 95 % interval from each site's bootstrap over its subjects. A site reports no subgroup with fewer "
    "subjects than task.min_subgroup or its policy says, nor one from which such a group could be computed."
)


def build_subgroups(runs: Sequence[RunResult]) -> ReportTable | None:
    """Return the metrics of each subgroup; None if no run has subgroups."""
    parts = [(run, cell) for run in runs for cell in pool_subgroups(run)]
    if not parts:
        return None
    names = list(dict.fromkeys(name for run, _ in parts for name in run.metric_names))
    rows = [
        [f"{cell.column} {cell.label}", run.label, str(cell.subjects), str(cell.sites)]
        + [
            format_interval(cell.metrics[name][0], cell.compute_interval(name)) if name in cell.metrics else "-"
            for name in names
        ]
        for run, cell in parts
    ]
    return ReportTable("Subgroups", ["subgroup", "run", "subjects", "sites", *names], rows, NOTE)


def describe_gap(run: RunResult) -> str:
    """Return the largest gap between two subgroups in a sentence; empty without subgroups."""
    gap = find_largest_gap(run, pool_subgroups(run))
    if gap is None:
        asked = run.config.get("task", {}).get("subgroups")
        reason = "no column has two subgroups that are large enough to report"
        return f"No gap between subgroups of {run.label} is stated: {reason}." if asked else ""
    unit = f" {run.summary['metric']['unit']}".rstrip()
    better, worse = (f"{cell.label} ({cell.metrics[gap.metric][0]:.3g})" for cell in (gap.better, gap.worse))
    return (
        f"The largest gap of {run.label} between subgroups is {gap.value:.3g}{unit} in {gap.metric}, by "
        f"{gap.better.column}: {worse} is worse than {better}. "
        f"It {'is more than' if gap.low > 0 else 'may be'} chance: its 95 % interval, for all pairs of "
        f"subgroups together, is {gap.low:.3g} to {gap.high:.3g}."
    )
