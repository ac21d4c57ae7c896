"""A script's calls of FLARE's API: seeds, and the refusal to return a model for which nothing was sent again."""

from __future__ import annotations

import random

import pytest

from flare_sparse.flare.script import MOST_RECEIVES, ScriptCalls


class FakeAPI:
    """Returns the same model until a result is sent, as FLARE does."""

    def __init__(self) -> None:
        self.model: object | None = object()

    def receive(self, timeout: float | None = None) -> object | None:
        return self.model

    def send(self, result: object, clear_cache: bool = True) -> None:
        self.model = object()

    def is_running(self) -> bool:
        return self.model is not None


def test_one_turn_may_receive_several_times_and_the_next_one_must_send_first() -> None:
    api = FakeAPI()
    ScriptCalls(api)
    for _ in range(3):
        assert api.is_running()
        assert api.receive() is api.receive() is api.model
        api.send("result")
    api.receive()
    assert api.is_running()
    with pytest.raises(RuntimeError, match=r"flare.receive\(\) again without flare.send\(\)"):
        api.receive()


def test_model_may_be_received_before_the_loop_and_its_first_turn_draws_the_seeds_numbers() -> None:
    """For the number of rounds: FLARE returns the same model in the loop's first turn."""
    drawn = []
    for peeks in (0, 2):
        api = FakeAPI()
        calls = ScriptCalls(api)
        calls.prepare_request(seed=5)
        for _ in range(peeks):
            api.receive()
            random.random()
        assert api.is_running()
        assert api.receive() is api.receive() is api.model
        drawn.append(random.random())
        api.send("result")
        assert api.is_running()
        api.receive()
        assert api.is_running()
        with pytest.raises(RuntimeError, match="again without"):
            api.receive()
    assert drawn[0] == drawn[1]


def test_loop_that_never_asks_whether_flare_is_running_ends_too() -> None:
    api = FakeAPI()
    ScriptCalls(api)
    for _ in range(MOST_RECEIVES):
        api.receive()
    with pytest.raises(RuntimeError, match="again without"):
        api.receive()


def test_end_of_the_job_is_no_model() -> None:
    api = FakeAPI()
    ScriptCalls(api)
    api.receive()
    api.model = None
    assert (api.is_running(), api.receive()) == (False, None)


def test_numbers_are_seeded_once_for_a_request() -> None:
    api, drawn = FakeAPI(), []
    calls = ScriptCalls(api)
    for _ in range(2):
        calls.prepare_request(seed=5)
        for _ in range(2):
            api.receive()
            drawn.append(random.random())
        api.send("result")
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
