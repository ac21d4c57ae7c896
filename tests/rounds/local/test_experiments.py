"""What the experiments choose, and from which examples; their figures are in docs/results/."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from flare_sparse.core.params import Layout
from flare_sparse.tasks.table import TableTask
from flare_sparse.tasks.task import Examples, Metric

FOLDER = str(Path(__file__).resolve().parents[3] / "benchmarks" / "experiments")


@pytest.fixture(scope="module")
def load_script() -> Iterator[Any]:
    sys.path.insert(0, FOLDER)
    yield importlib.import_module
    sys.path.remove(FOLDER)


def test_metagater_takes_the_steps_with_the_best_metric_on_validation_examples(load_script: Any) -> None:
    figures = {"lr 0.1": {"0.01": {"x": 3.0}, "0.1": {"x": 2.0}}, "lr 0.2": {"0.01": {"x": 2.5}, "0.1": {"x": 9.0}}}
    choose_steps = load_script("metagater").choose_steps
    assert choose_steps(figures, Metric("x", "", "min")) == ("lr 0.1", 0.1)
    assert choose_steps(figures, Metric("x", "", "max")) == ("lr 0.2", 0.1)


BRAIN = {"kind": "regression", "target": "age", "features": ["destrieux"], "scaling": "freesurfer"}


def test_targets_of_metagater_neither_train_nor_choose(load_script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    metagater, task = load_script("metagater"), TableTask(BRAIN)
    rows = TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1))
    examples = {name: Examples(rows, rows) for name in ("a", "b", "c")} | {
        "d": Examples(rows, TensorDataset(rows[:0][0]))
    }
    monkeypatch.setattr(metagater, "load_sites", lambda *_: (examples, ["b"]))
    layout = Layout.from_module(task.model())
    sites = metagater.build_sites(metagater.SETTINGS["brain"], task, layout, Path(), 1)
    assert (list(sites.training), list(sites.validation), list(sites.targets)) == (["a", "c", "d"], ["a", "c"], ["b"])
    assert [site.trainer.num_test_examples for site in sites.training.values()] == [0, 0, 0]


def test_difference_of_banking77_is_that_of_the_same_test_texts(load_script: Any) -> None:
    report = load_script("banking77_report")
    runs = [
        {"method": "lora_a2", "rank": 8, "seed": 1, "hits": {"site-1": "1" * 60, "site-2": "10" * 20}},
        {"method": "lora_a2", "rank": 1, "seed": 1, "hits": {"site-1": "1" * 50 + "0" * 10, "site-2": "10" * 20}},
        {"method": "lora_a2", "rank": 1, "seed": 2, "hits": {"site-1": "0" * 60, "site-2": "0" * 40}},
    ]
    (row,) = report.format_differences(runs)[3:]
    assert row.startswith("| LoRA-A2 rank 1 minus LoRA-A2 rank 8 | 1 | -10.0 [")
    assert row.endswith("| behind |")
