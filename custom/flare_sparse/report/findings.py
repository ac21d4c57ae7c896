"""What the figures of some runs say, in sentences: computed, with the unit, and no larger than the evidence."""

from __future__ import annotations

from statistics import median

from ..runs.progress import human_bytes
from ..runs.results import Run, dense_beside, gains_over_alone


def findings(runs: list[Run]) -> list[str]:
    """One sentence a finding."""
    said = [_sent(run) for run in runs if run.total("dense_bytes") and abs(run.less - 1) > 0.05]
    said += [_against(run, dense) for run in runs if (dense := dense_beside(run, runs))]
    said += [_worst(run) for run in runs if run.worst and len(run.by_site) > 1][:1]
    unit = f" {runs[0].summary['metric']['unit']}".rstrip()
    said += [_gain(label, gains, unit) for label, gains in gains_over_alone(runs).items()]
    return [sentence for sentence in said if sentence]


def caveat(runs: list[Run]) -> str:
    """What the reader must not conclude."""
    tests = runs[0].summary["final"]["metrics"].get("test_examples")
    of = f" on {tests:.0f} test examples" if tests else ""
    if len(runs) == 1:
        return f"A figure of one run{of}."
    seeds = {run.summary["seed"] for run in runs}
    if len(seeds) == 1:
        return f"One seed each{of}: differences between runs may be chance. Repeat with other seeds before you choose."
    return (
        f"{len(seeds)} seeds{of}: each run is held against those of its own seed. Two methods that are equals differ one way "
        f"in all of {len(seeds)} seeds once in {2 ** (len(seeds) - 1)} times."
    )


def _sent(run: Run) -> str:
    sent, dense = (human_bytes(run.total(what)) for what in ("payload_bytes", "dense_bytes"))
    if run.less < 1:
        return f"{run.label} sent {sent}, more than the {dense} of dense FedAvg in its place."
    return f"{run.label} sent {sent}, {run.less:.1f} times less than the {dense} of dense FedAvg in its place."


def _against(run: Run, dense: Run) -> str:
    if dense.final is None or run.final is None:
        return ""
    better = (run.final < dense.final) == run.lower_is_better
    unit = f" {run.summary['metric']['unit']}".rstrip()
    gap = f"{abs(run.final - dense.final):.3g}{unit}"
    if run.final == dense.final:
        return f"{run.label} ended with the {run.metric} of dense FedAvg."
    return f"{run.label} ended {gap} {'better' if better else 'worse'} than dense FedAvg ({run.final:.3g} and {dense.final:.3g})."


def _worst(run: Run) -> str:
    assert run.worst is not None
    site, figure = run.worst
    unit = run.summary["metric"]["unit"]
    return f"The site that {run.label} serves worst is {site}: {run.metric} {figure:.3g} {unit}".rstrip() + "."


def _gain(label: str, gains: dict[str, float], unit: str) -> str:
    won, least = sum(gain > 0 for gain in gains.values()), min(gains, key=lambda site: gains[site])
    return (
        f"{label} is better than training alone at {won} of {len(gains)} sites: median gain "
        f"{median(gains.values()):+.3g}{unit}, least {gains[least]:+.3g} at {least}."
    )
