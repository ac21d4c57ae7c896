"""Model card: what the model is, how it was trained, how well it performs at each site, and its limits."""

import math
from pathlib import Path
from typing import Any

import yaml

from ...rounds.federation.records import Participation
from ...tasks.task import TEST_EXAMPLES
from ..runs.progress import format_bytes
from ..runs.results import RunResult
from .attacks import describe_attacks
from .findings import describe_absent_sites, describe_data, describe_sites, describe_weight
from .tables import (
    ReportTable,
    build_evaluations,
    build_events,
    build_privacy,
    build_sizes,
    build_subgroups,
    describe_gap,
    describe_means,
    describe_tests,
    format_metric,
)
from .templates import fill_template

FILE = "model_card.md"


def write_card(run: RunResult) -> Path:
    """Write ``model_card.md`` into a run's folder: Markdown with the front matter that model hubs read."""
    path = run.path / FILE
    path.write_text(format_card(run), encoding="utf-8")
    return path


def format_card(run: RunResult) -> str:
    """Return the model card of a finished run as Markdown."""
    s = run.summary
    content = {
        "run": run,
        "s": s,
        "metadata": yaml.safe_dump(build_metadata(run), sort_keys=False, allow_unicode=True),
        "sites": describe_sites(run),
        "sparsity": f"{100 * s['sparsity']:.1f} % of its entries are off (zero)" if s["sparsity"] else "dense",
        "data": describe_data(run),
        "permit": run.config.get("permit"),
        "absent": describe_absent_sites(run),
        "withdrawn": run.withdrawn,
        "final": "no overall evaluation" if run.final_metric is None else f"{run.final_metric:.3f}",
        "weight": describe_weight([run]),
        "means": describe_means([run]),
        "performance": _build_performance(run),
        "gap": describe_gap(run),
        "sent": format_bytes(run.sum_directions("payload_bytes")),
        "dense": format_bytes(run.sum_directions("dense_bytes")),
        "attacks": describe_attacks(run),
        "tables": [
            build([run]) for build in (build_subgroups, build_evaluations, build_events, build_sizes, build_privacy)
        ],
    }
    return fill_template("report/card.md.jinja", content)


def build_metadata(run: RunResult) -> dict[str, Any]:
    """Return the card's front matter in the form of the Hugging Face hub, with the final metrics as a model index.

    Source: https://huggingface.co/docs/hub/model-cards, "Model card metadata" and "Evaluation results".
    """
    task = run.config.get("task", {}).get("name", "unknown")
    overall = run.summary["final"]["metrics"]
    metrics = [
        {"type": name, "name": run.metric_label if name == run.metric else name, "value": float(overall[name])}
        for name in run.metric_names
        if overall.get(name) is not None and math.isfinite(overall[name])
    ]
    metadata: dict[str, Any] = {
        "library_name": "pytorch",
        "tags": ["federated-learning", "nvidia-flare", "flare-sparse", str(run.summary["method"])],
        "metrics": [run.metric],
    }
    if metrics:
        cohort = {"name": f"test examples of {len(run.sites)} sites", "type": "federated"}
        result = {"task": {"type": "other", "name": str(task)}, "dataset": cohort, "metrics": metrics}
        metadata["model-index"] = [{"name": str(run.summary["name"]), "results": [result]}]
    return metadata


def _build_performance(run: RunResult) -> ReportTable:
    """Return a row for each site, also for one without contributions or test examples, and one for all sites."""
    final, names, rows = run.summary["final"], run.metric_names, []
    for site in run.sites:
        metrics, part = final["sites"].get(site, {}), run.contributions.get(site, Participation())
        rounds = f"{part.contributed} of {part.expected}" if part.expected else "never asked"
        rows.append([site, rounds, describe_tests(metrics), *(format_metric(metrics.get(name)) for name in names)])
    overall = final["metrics"]
    total = f"{overall.get(TEST_EXAMPLES, 0):.0f}"
    rows.append(["all sites", "", total, *(format_metric(overall.get(name)) for name in names)])
    return ReportTable("", ["site", "rounds contributed", "test examples", run.metric_label, *names[1:]], rows)
