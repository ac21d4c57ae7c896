"""Threads of the kernels and of torch."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.compute.kernels import threads as kernel_threads
from flare_sparse.compute.kernels.geometry import Part
from flare_sparse.compute.kernels.threads import _LEAST_WORK, divide, limit_kernel_threads, run_parts
from flare_sparse.config.loading import load_config
from flare_sparse.core.seeds import limit_threads

CONFIG = Path(__file__).parents[3] / "app_configs" / "neurosfl_brain_age.yaml"


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
def test_kernels_have_as_many_threads_as_torch() -> None:
    with limit_threads(2):
        assert len(collect_threads(MANY)) == 2
        assert threading.get_ident() in collect_threads(MANY)


def test_kernels_have_their_own_number_of_threads() -> None:
    assert torch.get_num_threads() == 1
    with limit_kernel_threads(2):
        assert len(collect_threads(MANY)) == 2
        assert threading.get_ident() in collect_threads(MANY)


@pytest.mark.usefixtures("_runtime")
def test_a_small_layer_wakes_no_thread() -> None:
    with limit_threads(2):
        assert collect_threads(MANY - 8) == {threading.get_ident()}


def test_layers_of_different_work_are_computed_by_the_same_threads() -> None:
    """GNU's runtime ends the threads that a smaller team leaves out."""
    seen = set()
    with limit_threads(4):
        for work in (8 * _LEAST_WORK, 2 * _LEAST_WORK, 3 * _LEAST_WORK) * 10:
            everyone = threading.Barrier(2)

            def compute(part: Part, barrier: threading.Barrier = everyone) -> None:
                seen.add(threading.get_native_id())
                with suppress(threading.BrokenBarrierError):
                    barrier.wait(timeout=0.01)

            run_parts(np.arange(9) * (work // 8), 1, compute)
    assert 2 <= len(seen) <= 4


def test_an_interrupt_before_the_first_line_of_the_callback_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that a signal handler raises there is printed by ctypes, which goes on."""

    def start(call: Callable[[object], None], *_: object) -> None:
        other = threading.Thread(target=call, args=(None,))
        other.start()
        other.join()

    monkeypatch.setattr(kernel_threads, "_find_parallel_region", lambda: start)
    with limit_threads(2), pytest.raises(KeyboardInterrupt):
        run_parts(np.arange(9) * MANY, 1, lambda part: None)


# Python 3.12 warns of a fork while there are other threads.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_computes_in_threads_of_its_own() -> None:
    def exit_with_threads() -> None:
        os._exit(len(collect_threads(MANY)))

    with limit_threads(2):
        collect_threads(MANY)
        child = multiprocessing.get_context("fork").Process(target=exit_with_threads, daemon=True)
        child.start()
    child.join(timeout=60)
    exitcode = child.exitcode
    child.kill()
    assert exitcode == 2


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
    both, ended = threading.Barrier(2, timeout=10), []

    def fail(part: Part) -> None:
        if both.wait() == 0:
            raise ValueError(f"channel {part.first_channel}")
        time.sleep(0.2)
        ended.append(part)
        raise ValueError(f"channel {part.first_channel}")

    with limit_threads(2), pytest.raises(ValueError, match="channel"):
        run_parts(np.arange(9) * MANY, 1, fail)
    assert len(ended) == 1


@pytest.mark.parametrize(("compute", "torch_threads"), [("sparse", 1), ("auto", 3), ("dense", 3)])
def test_torch_has_one_thread_beside_the_kernels(compute: str, torch_threads: int) -> None:
    config = load_config(CONFIG, [f"method.training.compute={compute}", "federation.threads=3"])
    assert config.torch_threads == torch_threads
