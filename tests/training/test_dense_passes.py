"""Between a request and its update no operation reads or writes the whole vector, if the mask is unchanged."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def passes() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks" / "performance"))
    yield importlib.import_module("dense_passes")
    sys.path.remove(str(ROOT / "benchmarks" / "performance"))


def list_operations(counter: Any) -> list[str]:
    return sorted(line.partition(" ")[0] for line in counter.passes.elements())


@pytest.mark.slow
def test_round_with_an_unchanged_mask_makes_no_pass_at_a_site(passes: Any) -> None:
    counters = passes.count_round(1, 0.9)
    assert counters["site"].passes == {}
    # The checkpoint counts the entries that are not 0; nothing for each site.
    assert list_operations(counters["server"]) == ["count_nonzero"]


@pytest.mark.slow
@pytest.mark.parametrize(("values", "at_server"), [("bfloat16", 4), ("int4", 3), ("bfloat16_zstd", 4)])
def test_format_that_rounds_copies_and_stores_its_residual(passes: Any, values: str, at_server: int) -> None:
    """The residual of weights that do not train is 0, so the checkpoint finds no mask with its positions."""
    counters = passes.count_round(1, 0.9, values)
    assert list_operations(counters["site"]) == ["_to_copy", "count_nonzero", "getitem", "not_equal", "packbits"]
    assert counters["server"].count == at_server


@pytest.mark.slow
def test_dense_round_is_counted(passes: Any) -> None:
    assert passes.count_round(1, 0.0)["site"].count > 5


def test_counter_counts_passes_of_torch_and_numpy_but_no_gather(passes: Any) -> None:
    vector, index = torch.ones(1000), torch.arange(10)
    with passes.PassCounter(1000) as counter:
        vector.add_(1)
        vector.index_select(0, index)
        vector.index_copy_(0, index, torch.zeros(10))
        vector[:100].mul(2)
        vector.view(10, 100).flatten()
        vector.numpy().take(index.numpy())
        np.take(vector.numpy(), index.numpy(), out=np.empty(10, np.float32), mode="clip")
        np.isfinite(vector.numpy()).all()
        vector.numpy().astype("<f4", copy=False).tobytes()
        np.count_nonzero(vector.numpy())
        bool((vector != 0).any())
    assert list_operations(counter) == ["add_", "any", "count_nonzero", "isfinite", "logical_and", "ne", "tobytes"]
