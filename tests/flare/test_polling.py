"""The requests of a site that waits for work: how long they are held, and the interval between them."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvflare.private.fed.server.server_runner import ServerRunner

from flare_sparse.flare import polling as module
from flare_sparse.flare.polling import LONGEST_S, MOST_HELD, SHARE, TaskPolling, compute_request_interval

NO_TASK = ("", "", None)


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
    runner = SimpleNamespace(config=SimpleNamespace(task_request_interval=2.0), _try_to_get_task=lambda *_: NO_TASK)
    intervals = []
    with patch("time.monotonic", side_effect=[0.0, 100.0, 100.0, 110.0, 200.0, 200.0]):
        polling = TaskPolling(runner, 0.05)
        for step in (polling.restart, polling.update, polling.restart):
            step()
            intervals.append(runner.config.task_request_interval)
    assert intervals == [0.05, 0.5, 0.05]


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.001)


class Runner:
    """The part of FLARE's ``ServerRunner`` that is changed; ``tasks`` are those of each client.

    Attributes:
        searches: number of searches for a task.
    """

    def __init__(self) -> None:
        self.config = SimpleNamespace(task_request_interval=2.0)
        self.tasks: dict[str, tuple[str, str, Any]] = {}
        self.searches = 0
        self._lock = threading.Lock()

    def _try_to_get_task(self, client: str, fl_ctx: Any) -> tuple[str, str, Any]:
        with self._lock:
            self.searches += 1
            return self.tasks.pop(client, NO_TASK)

    def wait_for_searches(self, count: int) -> None:
        """Wait until so many searches were made."""
        wait_until(lambda: self.searches >= count)


def ask(pool: ThreadPoolExecutor, runner: Runner, *clients: str) -> list[Future[tuple[tuple[str, str, Any], float]]]:
    """Send the requests of some clients; each yields its task and the seconds until it came."""

    def request(client: str) -> tuple[tuple[str, str, Any], float]:
        began = time.monotonic()
        return runner._try_to_get_task(client, None), time.monotonic() - began

    return [pool.submit(request, client) for client in clients]


def test_search_that_is_replaced_is_that_of_flare() -> None:
    assert list(inspect.signature(ServerRunner._try_to_get_task).parameters)[:3] == ["self", "client", "fl_ctx"]
    source = inspect.getsource(ServerRunner.process_task_request)
    assert "task_name, task_id, task_data = self._try_to_get_task(" in source


def test_task_that_is_there_is_given_at_once() -> None:
    runner = Runner()
    TaskPolling(runner, 0.05)
    runner.tasks["site-1"] = ("exchange", "1", None)
    assert runner._try_to_get_task("site-1", None)[1] == "1"
    assert runner.searches == 1


def test_held_request_takes_the_task_when_it_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task for another site does not end the wait."""
    monkeypatch.setattr(module, "HOLD_S", 300.0)
    runner = Runner()
    polling = TaskPolling(runner, 0.05)
    with ThreadPoolExecutor(2) as pool:
        first, second = ask(pool, runner, "site-1", "site-2")
        runner.wait_for_searches(2)
        runner.tasks["site-1"] = ("exchange", "1", None)
        polling.announce()
        assert first.result(30)[0][1] == "1"
        runner.wait_for_searches(4)
        assert not second.done()
        runner.tasks["site-2"] = ("exchange", "2", None)
        polling.announce()
        assert second.result(30)[0][1] == "2"
    # Each announcement costs one search of each held request, and nothing searches in between.
    assert runner.searches == 5


def test_task_that_comes_during_the_search_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_S", 300.0)
    runner = Runner()
    search: Callable[..., tuple[str, str, Any]] = runner._try_to_get_task

    def search_while_a_task_comes(client: str, fl_ctx: Any) -> tuple[str, str, Any]:
        task = search(client, fl_ctx)
        if runner.searches == 1:
            runner.tasks["site-1"] = ("exchange", "1", None)
            polling.announce()
        return task

    runner._try_to_get_task = search_while_a_task_comes  # type: ignore[method-assign]
    polling = TaskPolling(runner, 0.05)
    began = time.monotonic()
    assert runner._try_to_get_task("site-1", None)[1] == "1"
    assert time.monotonic() - began < 30


def test_request_without_a_task_ends_after_the_time_or_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_S", 0.05)
    runner = Runner()
    polling = TaskPolling(runner, 0.05)
    began = time.monotonic()
    assert runner._try_to_get_task("site-1", None) == NO_TASK
    assert 0.05 <= time.monotonic() - began < 30
    monkeypatch.setattr(module, "HOLD_S", 300.0)
    with ThreadPoolExecutor(1) as pool:
        (held,) = ask(pool, runner, "site-1")
        runner.wait_for_searches(3)
        polling.close()
        assert held.result(30)[0] == NO_TASK
        assert ask(pool, runner, "site-1")[0].result(30)[0] == NO_TASK


def test_more_requests_than_can_be_held_are_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_S", 300.0)
    runner = Runner()
    polling = TaskPolling(runner, 0.05)
    with ThreadPoolExecutor(MOST_HELD + 1) as pool:
        held = ask(pool, runner, *(f"site-{number}" for number in range(MOST_HELD)))
        runner.wait_for_searches(MOST_HELD)
        wait_until(lambda: not polling._places._value)
        (last,) = ask(pool, runner, "site-last")
        assert last.result(30)[0] == NO_TASK
        assert not any(request.done() for request in held)
        polling.close()
        assert {request.result(30)[0] for request in held} == {NO_TASK}
