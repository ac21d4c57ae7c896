"""How soon a site asks again."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from flare_sparse.flare.polling import LONGEST_S, SHARE, TaskPolling, compute_request_interval


@given(st.floats(0, 1e6), st.floats(0.01, 60))
def test_nobody_is_later_than_a_share_of_what_it_waited_unless_it_is_told_to_be(waited: float, shortest: float) -> None:
    wait = compute_request_interval(waited, shortest)
    assert shortest <= wait <= max(shortest, LONGEST_S)
    assert wait <= max(shortest, SHARE * waited)


def requests_in(round_s: float) -> int:
    asked, now = 0, 0.0
    while now < round_s:
        asked, now = asked + 1, now + compute_request_interval(now, 0.05)
    return asked


def test_requests_grow_with_the_logarithm_of_a_round() -> None:
    assert requests_in(1) == 20
    assert requests_in(10) == 20 + 48
    assert requests_in(100) == 20 + 48 + 47
    assert requests_in(3600) < 20 + 48 + 47 + 3600 / LONGEST_S


def test_the_server_is_told_while_a_question_is_out_and_anew_with_the_next() -> None:
    runner = SimpleNamespace(config=SimpleNamespace(task_request_interval=2.0))
    said = []
    with patch("time.monotonic", side_effect=[0.0, 100.0, 100.0, 110.0, 200.0, 200.0]):
        pace = TaskPolling(runner, 0.05)
        for step in (pace.begin, pace.go_on, pace.begin):
            step()
            said.append(runner.config.task_request_interval)
    assert said == [0.05, 0.5, 0.05]
