"""The table of benchmarks/performance/kernels.py takes lines of later runs without losing those of earlier ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "docs" / "results" / "kernels.csv"


@pytest.fixture(scope="module")
def table() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks" / "performance"))
    yield importlib.import_module("kernels_table")
    sys.path.remove(str(ROOT / "benchmarks" / "performance"))


def build_line(threads: int, dense_s: float, **fields: Any) -> dict[str, Any]:
    line = {"what": "inference", "network": "resnet32", "sparsity": 0.9, "pattern": "snip", "batch": 8, "onnx_s": 0.25}
    return {**line, "threads": threads, "dense_s": dense_s, "sparse_s": 0.5, "ratio": dense_s / 0.5} | fields


def test_two_threads_lie_below_one_thread_of_the_same_network(table: Any) -> None:
    training = build_line(1, 3.0, what="training", batch=None, onnx_s=None)
    earlier = table.format_table([build_line(1, 1.0), training])
    updated = table.update_table(
        earlier, [build_line(2, 0.75), {**training, "threads": 2, "dense_s": 2.0, "ratio": 4.0}]
    )
    assert updated.splitlines() == [
        "what,network,pattern,sparsity,batch,threads,dense_s,sparse_s,ratio,onnx_s",
        "inference,resnet32,snip,0.90,8,1,1.0000,0.5000,2.00,0.2500",
        "inference,resnet32,snip,0.90,8,2,0.7500,0.5000,1.50,0.2500",
        "training,resnet32,snip,0.90,,1,3.0000,0.5000,6.00,",
        "training,resnet32,snip,0.90,,2,2.0000,0.5000,4.00,",
    ]


def test_later_line_replaces_the_earlier_one_of_its_key(table: Any) -> None:
    merged = table.merge_lines([build_line(1, 1.0), build_line(2, 1.0)], [build_line(1, 4.0)])
    assert [(line["threads"], line["dense_s"]) for line in merged] == [(1, 4.0), (2, 1.0)]


def test_file_is_read_and_written_without_a_change(table: Any) -> None:
    text = TABLE.read_text()
    lines = table.read_table(text)
    assert {line["what"] for line in lines} == {"layer", "training", "inference"}
    assert table.update_table(text, []) == text
    assert table.update_table(text, lines[::2]) == text
