"""Model card: what the model is, how it was trained, how well it performs at each site, and its limits."""

import math
from pathlib import Path
from typing import Any

import yaml

from ...config.withdrawals import Withdrawals
from ...rounds.federation import Participation
from ...tasks.task import TEST_EXAMPLES
from ..runs.progress import format_bytes
from ..runs.results import RunResult
from .attacks import describe_attacks
from .findings import describe_data, describe_sites, describe_weight, list_absent
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
    format_markdown,
    format_metric,
)

FILE = "model_card.md"


def write_card(run: RunResult) -> Path:
    """Write ``model_card.md`` into a run's folder: Markdown with the front matter that model hubs read."""
    path = run.path / FILE
    path.write_text(format_card(run), encoding="utf-8")
    return path


def format_card(run: RunResult) -> str:
    """Return the model card of a finished run as Markdown."""
    s = run.summary
    final = "no overall evaluation" if run.final_metric is None else f"{run.final_metric:.3f}"
    tables = (
        build_subgroups([run]),
        build_evaluations([run]),
        build_events([run]),
        build_sizes([run]),
        build_privacy([run]),
    )
    sections = "".join(f"{_format_table(table)}\n" for table in tables if table is not None)
    sparsity = f"{100 * s['sparsity']:.1f} % of its entries are off (zero)" if s["sparsity"] else "dense"
    return f"""---
{yaml.safe_dump(build_metadata(run), sort_keys=False, allow_unicode=True)}---

# {s["name"]}

A model trained by federated learning with `{s["method"]}` on the data of {describe_sites(run)} for {s["rounds"]}
rounds, which ended on {run.times[1]:%Y-%m-%d} (seed {s["seed"]}); {sparsity}.
{describe_data(run)}{_describe_permit(run)}{_describe_absent(run)}
{_describe_withdrawn(run)}
## Performance

{run.metric_label} over the test examples of all sites: **{final}**. {describe_weight([run])} {describe_means([run])}

{_format_sites(run)}
{_describe_subgroups(run)}
## Communication

{format_bytes(run.sum_directions("payload_bytes"))} in {run.sum_directions("messages")} messages; dense FedAvg would
have sent {format_bytes(run.sum_directions("dense_bytes"))}.

{_describe_attacks(run)}{sections}## Usage

```python
from flare_sparse import load_model

model = load_model("{run.path.name}")  # this folder: a torch module in evaluation mode
```

The model is `model.safetensors` (sha256 of its values {s["model_sha256"]}) with `config.yaml`
beside it. `flare-sparse save` exports it for other libraries and as ONNX.

## Limits

Not for diagnosis or treatment: the model has not been validated for clinical use. Not for data of scanners, ages or
diseases that no site had. Federated training does not anonymize: a model can reveal information on its training data.
"""


def _format_table(table: ReportTable) -> str:
    """Return a table with its heading and note."""
    return f"## {table.title}\n\n{table.note}\n\n{format_markdown(table.columns, table.rows)}\n"


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


def _describe_permit(run: RunResult) -> str:
    permit = run.config.get("permit")
    return f" Permit: {permit}." if permit else ""


def _describe_absent(run: RunResult) -> str:
    listed = list_absent(run)
    return f"\n\nThe model learned nothing from these sites, which contributed to no round: {listed}." if listed else ""


def _describe_withdrawn(run: RunResult) -> str:
    text = Withdrawals.read(run.path).describe()
    return f"\n{text}\n" if text else ""


def _format_sites(run: RunResult) -> str:
    """Return a row for each site, also for one without contributions or test examples, and one for all sites."""
    final, names, rows = run.summary["final"], run.metric_names, []
    for site in run.sites:
        metrics, part = final["sites"].get(site, {}), run.contributions.get(site, Participation())
        rounds = f"{part.contributed} of {part.expected}" if part.expected else "never asked"
        rows.append([site, rounds, describe_tests(metrics), *(format_metric(metrics.get(name)) for name in names)])
    overall = final["metrics"]
    total = f"{overall.get(TEST_EXAMPLES, 0):.0f}"
    rows.append(["all sites", "", total, *(format_metric(overall.get(name)) for name in names)])
    return format_markdown(["site", "rounds contributed", "test examples", run.metric_label, *names[1:]], rows)


def _describe_subgroups(run: RunResult) -> str:
    """Return the largest gap between subgroups; empty without ``task.subgroups``."""
    gap = describe_gap(run)
    return f"\n**{gap}**\n" if gap else ""


def _describe_attacks(run: RunResult) -> str:
    """Return the section on ``flare-sparse audit``; empty without an audit."""
    sentences = "\n".join(f"- {sentence}" for sentence in describe_attacks(run))
    return f"## Attacks\n\n{sentences}\n\n" if sentences else ""
