"""Examples of the models that an attacker trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from flare_sparse.compute.kernels import threads
from flare_sparse.config.loading import load_config
from flare_sparse.results.audit import training
from flare_sparse.results.audit.training import AuditedExamples, draw_reference_rows, select_rows
from flare_sparse.results.runs import local
from flare_sparse.rounds.local.run import Course
from flare_sparse.tasks.task import Examples

CONFIG = Path(__file__).parents[3] / "app_configs" / "neurosfl_brain_age.yaml"

SITES = np.array(["a"] * 10 + ["b"] * 7)


def test_reference_models_train_on_complementary_halves_of_every_site() -> None:
    first, second, third = (draw_reference_rows(SITES, number, seed=4) for number in (1, 2, 3))
    assert (first ^ second).all()
    assert (first[SITES == "a"].sum(), first[SITES == "b"].sum()) == (5, 3)
    assert (third != first).any()
    assert (draw_reference_rows(SITES, 1, seed=4) == first).all()


def test_selected_rows_are_the_examples_of_their_site() -> None:
    parts = torch.arange(17.0).split([6, 4, 5, 2])
    a, b = (Examples(TensorDataset(parts[i]), TensorDataset(parts[i + 1])) for i in (0, 2))
    chosen = np.zeros(17, dtype=bool)
    chosen[[0, 6, 9, 11, 16]] = True
    selected = select_rows(AuditedExamples.from_sites({"b": b, "a": a}), chosen)
    values = {site: [dataset[i][0].item() for i in range(len(dataset))] for site, dataset in selected.items()}
    assert values == {"a": [0, 6, 9], "b": [11, 16]}


def test_reference_models_train_with_the_threads_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``compute: sparse`` torch has one thread: its number decides which layers the kernels compute."""
    seen = []

    def stop(*_: object, course: Course, **__: object) -> None:
        seen.append((course.threads, threads._num_threads))
        raise InterruptedError

    monkeypatch.setattr(local, "run_locally", stop)
    config = load_config(CONFIG, ["method.training.compute=sparse", "federation.threads=2"])
    with pytest.raises(InterruptedError):
        training.Retraining(CONFIG.parent, config, {}, {}).train({}, seed=1)
    assert seen == [(1, 2)]
