"""The interval between the requests of a site that waits for work."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.flare.polling import LONGEST_S, SHARE, TaskPolling, compute_request_interval


@given(st.floats(0, 1e6), st.floats(0.01, 60))
def test_delay_is_at_most_a_share_of_the_elapsed_time_or_the_shortest_interval(elapsed: float, shortest: float) -> None:
    interval = compute_request_interval(elapsed, shortest)
    assert shortest <= interval <= max(shortest, LONGEST_S)
    assert interval <= max(shortest, SHARE * elapsed)


def count_requests(round_s: float) -> int:
    requests, elapsed = 0, 0.0
    while elapsed < round_s:
        requests, elapsed = requests + 1, elapsed + compute_request_interval(elapsed, 0.05)
    return requests


def test_requests_grow_with_the_logarithm_of_a_rounds_length() -> None:
    assert count_requests(1) == 20
    assert count_requests(10) == 20 + 48
    assert count_requests(100) == 20 + 48 + 47
    assert count_requests(3600) < 20 + 48 + 47 + 3600 / LONGEST_S


def test_interval_grows_during_an_attempt_and_restarts_with_the_next() -> None:
    runner = SimpleNamespace(config=SimpleNamespace(task_request_interval=2.0))
    intervals = []
    with patch("time.monotonic", side_effect=[0.0, 100.0, 100.0, 110.0, 200.0, 200.0]):
        polling = TaskPolling(runner, 0.05)
        for step in (polling.restart, polling.update, polling.restart):
            step()
            intervals.append(runner.config.task_request_interval)
    assert intervals == [0.05, 0.5, 0.05]
