"""Threads of the kernels and of torch."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.config import load_config
from flare_sparse.kernels.arguments import Part
from flare_sparse.kernels.threads import _LEAST_WORK, divide, limit_kernel_threads, run_parts

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_brain_age.yaml"


def collect_threads(multiplications: int) -> set[str]:
    """Return the names of the threads that compute a layer of 8 channels, as many as can run at once."""
    names = set()
    everyone = threading.Event()

    def compute(part: Part) -> None:
        names.add(threading.current_thread().name)
        if len(names) == 2:
            everyone.set()
        # No thread takes its next part before the other has one.
        everyone.wait(timeout=2 if multiplications >= MANY else 0)

    run_parts(np.arange(9) * (multiplications // 8), 1, compute)
    return names


MANY = 2 * _LEAST_WORK


def test_kernels_have_their_own_number_of_threads() -> None:
    own = threading.current_thread().name
    assert torch.get_num_threads() == 1
    with limit_kernel_threads(2):
        assert len(collect_threads(MANY)) == 2
        assert own in collect_threads(MANY)


def test_a_small_layer_wakes_no_thread() -> None:
    with limit_kernel_threads(2):
        assert collect_threads(MANY - 8) == {threading.current_thread().name}


@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=20),
    samples=st.integers(1, 9),
    threads=st.integers(1, 5),
    divides_samples=st.booleans(),
)
def test_every_channel_of_every_sample_is_in_one_part(
    weights: list[int], samples: int, threads: int, divides_samples: bool
) -> None:
    work = np.cumsum([0, *weights])
    computed = np.zeros((samples, len(weights)), int)
    for part in divide(work, samples, threads, divides_samples=divides_samples):
        computed[part.first_sample : part.last_sample, part.first_channel : part.last_channel] += 1
        assert divides_samples or part[:2] == (0, samples)
    assert (computed == 1).all()


def test_channels_are_divided_by_their_work() -> None:
    parts = list(divide(np.array([0, 700, 750, 800, 800]), 1, 1, divides_samples=True))
    assert parts == [Part(0, 1, 0, 4)]
    parts = list(divide(np.array([0, 1000, 1100, 1200, 2000]), 1, 2, divides_samples=True))
    assert [part[2:] for part in parts] == [(0, 1), (1, 4)]


def test_an_error_in_a_part_is_raised_after_all_threads_have_ended() -> None:
    def fail(part: Part) -> None:
        raise ValueError(f"channel {part.first_channel}")

    with limit_kernel_threads(2), pytest.raises(ValueError, match="channel"):
        run_parts(np.arange(9) * MANY, 1, fail)


@pytest.mark.parametrize(("compute", "torch_threads"), [("sparse", 1), ("auto", 3), ("dense", 3)])
def test_torch_has_one_thread_beside_the_kernels(compute: str, torch_threads: int) -> None:
    config = load_config(CONFIG, [f"method.training.compute={compute}", "federation.threads=3"])
    assert config.torch_threads == torch_threads
