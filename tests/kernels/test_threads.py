"""Threads of the kernels and of torch."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from flare_sparse.config import load_config
from flare_sparse.kernels.threads import limit_kernel_threads, run_parts

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_brain_age.yaml"


def collect_threads() -> set[str]:
    """Return the names of the threads that compute the parts of a layer, as many as can run at once."""
    names = set()
    barrier = threading.Barrier(2)

    def compute(sample: int, first: int, last: int) -> None:
        names.add(threading.current_thread().name)
        if "sparse-kernels" in threading.current_thread().name:
            # Neither thread takes its next part before the other has one.
            barrier.wait(timeout=10)

    run_parts(8, 1, compute)
    return names


def test_kernels_have_their_own_number_of_threads() -> None:
    assert torch.get_num_threads() == 1
    assert collect_threads() == {threading.current_thread().name}
    with limit_kernel_threads(2):
        assert len(collect_threads()) == 2
    assert collect_threads() == {threading.current_thread().name}


@pytest.mark.parametrize(("compute", "torch_threads"), [("sparse", 1), ("auto", 3), ("dense", 3)])
def test_torch_has_one_thread_beside_the_kernels(compute: str, torch_threads: int) -> None:
    config = load_config(CONFIG, [f"method.training.compute={compute}", "federation.threads=3"])
    assert config.torch_threads == torch_threads
