"""Model card: what the model is, how it was trained, how well it performs at each site, and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..runs.progress import format_bytes
from ..runs.results import RunResult
from .findings import describe_caveat

FILE = "model_card.md"


def write_card(run: RunResult) -> Path:
    """Write ``model_card.md`` into a run's folder: Markdown with the front matter that model hubs read."""
    path = run.path / FILE
    path.write_text(format_card(run), encoding="utf-8")
    return path


def format_card(run: RunResult) -> str:
    """Return the model card of a finished run as Markdown."""
    s = run.summary
    sites = "\n".join(
        f"| {site} | {metrics.get('test_examples', 0):.0f} | {metrics.get(run.metric, float('nan')):.3f} |"
        for site, metrics in sorted(s["final"]["sites"].items())
    )
    final = "no overall evaluation" if run.final_metric is None else f"{run.final_metric:.3f}"
    sparsity = f"{100 * s['sparsity']:.1f} % of its entries are off (zero)" if s["sparsity"] else "dense"
    return f"""---
library_name: pytorch
tags: [federated-learning, nvidia-flare, flare-sparse, {s["method"]}]
metrics: [{run.metric}]
---

# {s["name"]}

A model trained by federated learning with `{s["method"]}` over {len(s["sites"])} sites for {s["rounds"]} rounds (seed
{s["seed"]}); {sparsity}. The data never left the sites.

## Performance

{run.metric_label} over the test examples of all sites: **{final}**. {describe_caveat([run])}

| site | test examples | {run.metric_label} |
| --- | --- | --- |
{sites}

## Communication

{format_bytes(run.sum_directions("payload_bytes"))} in {run.sum_directions("messages")} messages; dense FedAvg would
have sent {format_bytes(run.sum_directions("dense_bytes"))}.

## Usage

```python
from flare_sparse import load_model

model = load_model("{run.path.name}")  # this folder: a torch module in evaluation mode
```

The model is `model.safetensors` ({_describe_digest(s)}) with `config.yaml` beside it. `flare-sparse save` exports it
for other libraries and as ONNX.

## Limits

Not for diagnosis or treatment: the model has not been validated for clinical use. Not for data of scanners, ages or
diseases that no site had. Federated training does not anonymize: a model can reveal information on its training data.
"""


def _describe_digest(summary: dict[str, Any]) -> str:
    """Return the digest of the model's values; an encrypted model has none until a site decrypts it."""
    digest = summary["model_sha256"]
    return f"sha256 of its values {digest}" if digest else "encrypted; a site decrypts it: `flare-sparse decrypt`"
