"""Rows of tests that run every method or every configuration."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from flare_sparse.methods.registry import METHODS

MAIN = {"fedavg", "fedsparsify", "lora_a2", "metagater", "neurosfl", "scbf", "scbfwp", "topk_ef"}
"""The papers' methods, FedAvg and top-k; the other methods are baselines."""
JOBS = {folder.name for folder in (Path(__file__).parents[2] / "jobs").iterdir()}
"""Configurations of the repository's jobs; the others are long."""


def list_method_rows(names: Iterable[str] = METHODS) -> list[Any]:
    """Return a row for each method; those of the baselines are long."""
    return [pytest.param(name, marks=[] if name in MAIN else [pytest.mark.long], id=name) for name in names]
