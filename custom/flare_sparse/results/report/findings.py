"""Findings of a comparison in sentences and as tables: computed from the runs, with units, and no stronger than the
evidence.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from ..runs.comparison import describe_runs
from ..runs.progress import EQUAL, compare_with_dense, format_bytes
from ..runs.results import RunResult, compute_site_gains, group_by_seed
from .tables import ReportTable, describe_gap, format_metric

VERDICTS = {"ahead": "better", "behind": "worse", "undecided": "undecided"}
"""Verdicts of a comparison, in words that no reader takes for a place in a queue, by those of the record."""

BASELINES_NOTE = (
    "On the test subjects of all sites at once; in brackets the 95 % bootstrap interval over subjects within their "
    "site. Better and worse: the interval excludes 0, and the subjects are at least five more than the sites. The "
    "baselines are the mean of each site, and a linear model of each site alone and of all sites pooled."
)
GROUPS_NOTE = "Every subject counts once, with its mean over the seeds and folds that tested it; intervals as above."


def describe_findings(runs: list[RunResult], compared: Mapping[str, Any] | None = None) -> list[str]:
    """Return the findings, one sentence each: gap between subgroups, baselines, traffic, FedAvg, gains.

    Args:
        runs: the runs.
        compared: their comparison, :func:`flare_sparse.results.runs.comparison.describe_runs`; None: computed here.
    """
    described = (compared or describe_runs(runs, {}))["runs"]
    sentences = [*(describe_gap(run) for run in runs), *(_describe_absent(run) for run in runs)]
    sentences += [_compare_with_baselines(*pair) for pair in zip(runs, described, strict=True)]
    sentences += [_describe_traffic(label, group) for label, group in group_by_seed(runs)]
    sentences += [_compare_with_dense(run, runs) for run in runs]
    unit = f" {runs[0].summary['metric']['unit']}".rstrip()
    sentences += [_describe_gains(label, gains, unit) for label, gains in compute_site_gains(runs).items()]
    return [sentence for sentence in sentences if sentence]


def describe_data(run: RunResult) -> str:
    """Return a sentence on where the data of a run was."""
    if run.is_synthetic:
        return "The data is synthetic: brain phantoms, of no patients."
    simulated = run.config.get("simulator")
    return "All sites were simulated on one machine." if simulated else "The data never left the sites."


def describe_caveat(runs: list[RunResult]) -> str:
    """Return what data the findings are about, and their statistical weight."""
    return " ".join([*dict.fromkeys(map(describe_data, runs)), describe_weight(runs)])


def describe_weight(runs: list[RunResult]) -> str:
    """Return a sentence on the statistical weight of the findings."""
    num_tests = runs[0].summary["final"]["metrics"].get("test_examples")
    evidence = f" on {num_tests:.0f} test examples" if num_tests else ""
    if len(runs) == 1:
        return f"This is the result of one run{evidence}."
    seeds = {run.summary["seed"] for run in runs}
    if len(seeds) == 1:
        return f"One seed per run{evidence}: differences may be due to chance. Repeat with other seeds before choosing."
    return (
        f"{len(seeds)} seeds{evidence}: each run is compared with the runs of its own seed. Two equally good methods "
        f"differ in the same direction in all {len(seeds)} seeds with probability 1/{2 ** (len(seeds) - 1)}."
    )


def describe_sites(run: RunResult) -> str:
    """Return how many sites contributed, such as ``3 of 4 sites contributed``."""
    parts = run.contributions
    contributed = [site for site, part in parts.items() if part.contributed]
    return f"{len(parts)} sites" if len(contributed) == len(parts) else f"{len(contributed)} of {len(parts)} sites"


def _describe_absent(run: RunResult) -> str:
    """Return the sites that contributed to no round; empty if there are none."""
    listed = describe_absent_sites(run)
    return f"{run.label} learned nothing from {listed}, which contributed to no round." if listed else ""


def describe_absent_sites(run: RunResult) -> str:
    """Return the sites that contributed to no round, with the reasons; empty if there are none."""
    absent = {site: part for site, part in run.contributions.items() if not part.contributed}
    return ", ".join(f"{site} ({part.describe_missed() or 'never asked'})" for site, part in absent.items())


def _compare_with_baselines(run: RunResult, described: Mapping[str, Any]) -> str:
    """Return how a run compares with the best of its trivial baselines; empty without predictions."""
    by_baseline = described["differences"] or {}
    differences = {name: found[run.metric] for name, found in by_baseline.items() if run.metric in found}
    if not differences:
        return ""
    choose_best = min if run.lower_is_better else max
    name = choose_best(differences, key=lambda baseline: differences[baseline]["second"])
    best, unit = differences[name], f" {run.summary['metric']['unit']}".rstrip()
    if (verdict := VERDICTS[best["verdict"]]) == VERDICTS["undecided"]:
        difference = f"{best['value']:+.2g}{unit} (95 % interval {best['low']:+.2g} to {best['high']:+.2g})"
        return (
            f"Whether {run.label} or {name}, the best trivial baseline, predicts better cannot be told from these test "
            f"subjects: {run.metric} differs by {difference}."
        )
    ends = sorted((abs(best["low"]), abs(best["high"])))
    way = "lower" if best["value"] < 0 else "higher"
    return (
        f"On these test subjects {run.label} predicts {verdict} than {name}, the best trivial baseline: its "
        f"{run.metric} is {abs(best['value']):.2g}{unit} {way} (95 % interval {ends[0]:.2g} to {ends[1]:.2g})."
    )


def _describe_traffic(label: str, group: list[RunResult]) -> str:
    """Return the bytes of runs that differ by seed only, on average; empty where they are those of dense FedAvg."""
    sent, dense = (mean(run.sum_directions(key) for run in group) for key in ("payload_bytes", "dense_bytes"))
    average, compared = " on average" if len(group) > 1 else "", compare_with_dense(sent, dense)
    if not dense or not sent or compared == EQUAL:
        return ""
    return f"{label} sent {format_bytes(sent)}{average}, {compared} FedAvg ({format_bytes(dense)})."


def _compare_with_dense(run: RunResult, runs: list[RunResult]) -> str:
    """Compare a run with dense FedAvg of its seed and fold, which has the same initial weights and split."""
    found = [other for other in runs if other.split == run.split and other.summary["method"] == "fedavg"]
    dense = next((other for other in found if _compare_bytes(other) == EQUAL), run)
    if dense is run or dense.final_metric is None or run.final_metric is None:
        return ""
    if run.final_metric == dense.final_metric:
        return f"{run.label} ended with the same {run.metric} as dense FedAvg."
    comparison = "better" if (run.final_metric < dense.final_metric) == run.lower_is_better else "worse"
    unit = f" {run.summary['metric']['unit']}".rstrip()
    return (
        f"{run.label} ended {abs(run.final_metric - dense.final_metric):.3g}{unit} {comparison} than dense FedAvg "
        f"({run.final_metric:.3g} and {dense.final_metric:.3g})."
    )


def _compare_bytes(run: RunResult) -> str:
    return compare_with_dense(run.sum_directions("payload_bytes"), run.sum_directions("dense_bytes"))


def _describe_gains(label: str, gains: dict[str, float], unit: str) -> str:
    num_better, worst = sum(gain > 0 for gain in gains.values()), min(gains, key=lambda site: gains[site])
    return (
        f"{label} is better than training alone at {num_better} of {len(gains)} sites: median gain "
        f"{median(gains.values()):+.3g}{unit}, smallest gain {gains[worst]:+.3g} at {worst}."
    )


def build_comparisons(compared: Mapping[str, Any]) -> list[ReportTable]:
    """Return each run beside its trivial baselines, and each pair of groups of runs, on the same test subjects.

    Args:
        compared: of :func:`flare_sparse.results.runs.comparison.describe_runs`.
    """
    groups = compared["groups"]
    beside = [(run, name) for run in compared["runs"] for name in run["baselines"] or ()]
    between = [(group, other["label"]) for number, group in enumerate(groups) for other in groups[number + 1 :]]
    tables = (
        ("Compared with trivial baselines", "run", "baseline", BASELINES_NOTE, beside),
        ("Runs on the same test subjects", "first", "second", GROUPS_NOTE, between),
    )
    return [table for parts in tables if (table := _build_differences(*parts)).rows or table.note != parts[3]]


def _build_differences(
    title: str, first: str, second: str, note: str, pairs: Sequence[tuple[Mapping[str, Any], str]]
) -> ReportTable:
    rows, lacks = [], [note]
    for one, other in pairs:
        name = f"{one['label']} against {other}"
        for metric, difference in one["differences"].get(other, {}).items():
            rows.append([name, metric, *_format_difference(difference)])
        if reason := one["notes"].get(other):
            lacks.append(f"{name}: {reason}.")
    columns = ["comparison", "metric", first, second, "difference", "verdict", "sites that gain", "worst site"]
    return ReportTable(title, columns, rows, " ".join(lacks))


def _format_difference(difference: Mapping[str, Any]) -> list[str]:
    share, worst = difference["sites_that_gain"], difference["worst_site"]
    change = f"{difference['value']:+.3f} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
    return [
        format_metric(difference["first"]),
        format_metric(difference["second"]),
        change,
        VERDICTS[difference["verdict"]],
        "-" if share is None else f"{share:.0%}",
        f"{worst} ({difference['by_site'][worst]:+.3f})" if worst else "-",
    ]
