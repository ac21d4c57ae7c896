"""Threads of the kernels and of torch."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.config import load_config
from flare_sparse.kernels import threads as kernel_threads
from flare_sparse.kernels.arguments import Part
from flare_sparse.kernels.threads import _LEAST_WORK, divide, limit_kernel_threads, run_parts

CONFIG = Path(__file__).parents[2] / "app_configs" / "neurosfl_brain_age.yaml"


MANY = 2 * _LEAST_WORK


@pytest.fixture(params=["OpenMP", "pool"])
def _runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels compute in the threads of torch's OpenMP runtime or, where torch has none, of a pool."""
    if request.param == "pool":
        monkeypatch.setattr(kernel_threads, "_find_parallel_region", lambda: None)
    else:
        assert kernel_threads._find_parallel_region() is not None


def collect_threads(multiplications: int) -> set[int]:
    """Return the identifiers of the threads that compute a layer of 8 channels, as many as can run at once."""
    seen = set()
    everyone = threading.Event()

    def compute(part: Part) -> None:
        seen.add(threading.get_ident())
        if len(seen) == 2:
            everyone.set()
        # No thread takes its next part before the other has one.
        everyone.wait(timeout=2 if multiplications >= MANY else 0)

    run_parts(np.arange(9) * (multiplications // 8), 1, compute)
    return seen


@pytest.mark.usefixtures("_runtime")
def test_kernels_have_their_own_number_of_threads() -> None:
    own = threading.get_ident()
    assert torch.get_num_threads() == 1
    with limit_kernel_threads(2):
        assert len(collect_threads(MANY)) == 2
        assert own in collect_threads(MANY)


@pytest.mark.usefixtures("_runtime")
def test_a_small_layer_wakes_no_thread() -> None:
    with limit_kernel_threads(2):
        assert collect_threads(MANY - 8) == {threading.get_ident()}


def test_a_forked_process_computes_in_threads_of_its_own() -> None:
    def exit_with_threads() -> None:
        with limit_kernel_threads(2):
            os._exit(len(collect_threads(MANY)))

    with limit_kernel_threads(2):
        collect_threads(MANY)
    child = multiprocessing.get_context("fork").Process(target=exit_with_threads)
    child.start()
    child.join(timeout=60)
    assert child.exitcode == 2


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


@pytest.mark.usefixtures("_runtime")
def test_an_error_in_a_part_is_raised_after_all_threads_have_ended() -> None:
    ended = []

    def fail(part: Part) -> None:
        try:
            raise ValueError(f"channel {part.first_channel}")
        finally:
            ended.append(part)

    with limit_kernel_threads(2), pytest.raises(ValueError, match="channel"):
        run_parts(np.arange(9) * MANY, 1, fail)
    assert 1 <= len(ended) <= 2


@pytest.mark.parametrize(("compute", "torch_threads"), [("sparse", 1), ("auto", 3), ("dense", 3)])
def test_torch_has_one_thread_beside_the_kernels(compute: str, torch_threads: int) -> None:
    config = load_config(CONFIG, [f"method.training.compute={compute}", "federation.threads=3"])
    assert config.torch_threads == torch_threads
