"""The model of a finished run, adapted to a site that took no part in it."""

import time
from pathlib import Path
from typing import Any

from torch import Tensor

from ...config.assemble import Assembly
from ...core.checkpoint.writing import write_json
from ...core.errors import DataError
from ...core.mask import Mask
from ...core.params import compute_digest
from ...training import Site
from .model_files import read_mask, read_model, save_model

ADAPTED, ADAPTATION = "adapted", "adaptation.json"
"""Folder of a result folder with a folder for each new site, and the file of figures in it."""


def adapt_to_site(assembly: Assembly, site: Site, run: Path, folder: Path) -> dict[str, Any]:
    """Adapt the model in ``run`` to a site, write the result to ``folder`` and return the figures.

    Raises:
        ConfigError: the model does not belong to this job, or the method does not adapt.
        DataError: the site has no training examples.
    """
    if not site.num_examples:
        raise DataError(f"site {site.name!r} has no training examples; adaptation needs some")
    weights = read_model(run / "model.safetensors", assembly.layout)
    live = read_mask(run / "model.safetensors", assembly.layout)
    site.weights = weights.clone()
    before = site.evaluate(weights)
    began = time.perf_counter()
    adapted = assembly.method.adapt(site, live).cpu()
    seconds = time.perf_counter() - began
    folder.mkdir(parents=True, exist_ok=True)
    after = site.evaluate(adapted)
    assert site.evaluated is not None, "the adapted model was evaluated"
    save_model(folder / "model.safetensors", *site.evaluated)
    figures = {
        "method": assembly.method.name,
        "site": site.name,
        "training_examples": site.num_examples,
        "before": before,
        "after": after,
        "sparsity": 1 - _count_nonzero(adapted, live) / adapted.numel(),
        "adaptation_seconds": seconds,
        "sha256_before": compute_digest(weights),
        "sha256_after": compute_digest(adapted),
    }
    write_json(folder / ADAPTATION, figures)
    return figures


def _count_nonzero(weights: Tensor, live: Mask) -> int:
    """Count the live weights that are not zero; an adaptation may prune further."""
    return int((live.take(weights) != 0).sum())
