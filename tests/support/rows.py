"""Rows of tests that run every method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from flare_sparse.methods.registry import METHODS

MAIN = {"fedavg", "fedsparsify", "lora_a2", "metagater", "neurosfl", "scbf", "scbfwp", "topk_ef"}
"""The papers' methods, FedAvg and top-k; the other methods are baselines."""


def list_method_rows(names: Iterable[str] = METHODS) -> list[Any]:
    """Return a row for each method; those of the baselines are long."""
    return [pytest.param(name, marks=[] if name in MAIN else [pytest.mark.long], id=name) for name in names]
