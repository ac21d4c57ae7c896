"""The memory of a training step, against what it must hold and against what the process takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flare_sparse.api.memory import PeakMemory, measure_step
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "app_configs"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "performance" / "step_memory.py"


def test_storages_are_counted_once_and_until_they_end() -> None:
    with PeakMemory() as memory:
        first = torch.zeros(1000)
        view = first[:10] + 0
        del first
        second = torch.ones(500, dtype=torch.float64)
    assert memory.peak == 4000 + 40
    assert [float(tensor.sum()) for tensor in (view, second)] == [0, 500]


def test_step_holds_weights_and_gradients_and_grows_with_the_minibatch() -> None:
    file = CONFIGS / "neurosfl_brain_age.yaml"
    one, four = (measure_step(Study.load(file, [f"method.training.batch_size={size}"])) for size in (1, 4))
    assert one["total"] == one["weights"] + one["step"]
    assert one["weights"] < one["step"] < four["step"]
    assert (one["batch_size"], four["batch_size"]) == (1, 4)


def test_study_without_data_here_is_told_what_is_missing() -> None:
    study = Study.load(CONFIGS / "neurosfl_brain_age.yaml")
    with pytest.raises(ConfigError, match="needs data in a simulator section"):
        measure_step(Study(study.config.model_copy(update={"simulator": None}), study.file))


@pytest.mark.long
def test_process_takes_what_was_counted() -> None:
    """Within a tenth: the memory of a process counts pages, and what the kernels of a convolution need."""
    line = [sys.executable, str(BENCHMARK), "--networks", "basic_unet"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert 0.9 < json.loads(done.stdout)["ratio"] < 1.1
