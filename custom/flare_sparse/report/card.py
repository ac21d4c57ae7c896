"""A model card: what the model is, how it was made, how good it is where, and what it is not for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..runs.progress import human_bytes
from ..runs.results import Run
from .findings import caveat

FILE = "model_card.md"


def write_card(run: Run) -> Path:
    """Write ``model_card.md`` into a run's folder: Markdown with the front matter that model hubs read."""
    path = run.path / FILE
    path.write_text(card(run), encoding="utf-8")
    return path


def card(run: Run) -> str:
    """The card of a finished run."""
    s = run.summary
    sites = "\n".join(f"| {site} | {found.get('test_examples', 0):.0f} | {found.get(run.metric, float('nan')):.3f} |"
                      for site, found in sorted(s["final"]["sites"].items()))  # fmt: skip
    final = "not judged as a whole" if run.final is None else f"{run.final:.3f}"
    off = f"{100 * s['sparsity']:.1f} % of its entries are zero and stay so" if s["sparsity"] else "dense"
    return f"""---
library_name: pytorch
tags: [federated-learning, nvidia-flare, flare-sparse, {s["method"]}]
metrics: [{run.metric}]
---

# {s["name"]}

A model trained by federated learning with `{s["method"]}` over {len(s["sites"])} sites for {s["rounds"]} rounds (seed
{s["seed"]}); {off}. The data never left the sites.

## How good

{run.metric_label} over all sites' own test examples: **{final}**. {caveat([run])}

| site | test examples | {run.metric_label} |
| --- | --- | --- |
{sites}

## What travelled

{human_bytes(run.total("payload_bytes"))} in {run.total("messages")} messages; dense FedAvg would have sent
{human_bytes(run.total("dense_bytes"))} in their place.

## To use it

```python
from flare_sparse import load_model

model = load_model("{run.path.name}")  # this folder: a torch module in evaluation mode
```

`model.safetensors` ({_digest(s)}) with `config.yaml` beside it;
`flare-sparse save` writes it for other libraries and as ONNX.

## Not for

Diagnosis or treatment: nothing here has been validated for that. Data of scanners, ages or diseases that no site had.
Federated training is not anonymity: what a model has learned can tell of the people it learned from.
"""


def _digest(summary: dict[str, Any]) -> str:
    """What tells the model from others; an encrypted one has nothing until a site decrypts it."""
    digest = summary["model_sha256"]
    return f"sha256 of its values {digest}" if digest else "encrypted; a site opens it: `flare-sparse decrypt`"
