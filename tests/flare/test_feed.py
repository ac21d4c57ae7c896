"""Rounds of a running job for an admin: each once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext

from flare_sparse.flare import feed as feed_module
from flare_sparse.flare.feed import TOPIC, RecordFeed


def ask(feed: RecordFeed, data: Any) -> list[int]:
    """Return the rounds of the answer's lines."""
    return [line["round"] for line in json.loads(feed.answer(TOPIC, data, FLContext())["rounds"])]


def test_only_new_rounds_are_answered() -> None:
    feed = RecordFeed()
    assert ask(feed, None) == []
    feed.commit({"round": 1})
    assert ask(feed, {"rounds": 0}) == [1]
    assert ask(feed, {"rounds": 1}) == []
    feed.commit({"round": 2})
    assert ask(feed, {"rounds": 1}) == [2]


@pytest.mark.parametrize("data", ["all", {"rounds": -5}, {"rounds": None}, [1]])
def test_malformed_question_counts_as_one_from_the_start(data: Any) -> None:
    feed = RecordFeed()
    feed.commit({"round": 1})
    assert ask(feed, data) == [1]


def test_long_record_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_LINES", 3)
    feed = RecordFeed()
    for number in range(5):
        feed.commit({"round": number})
    assert ask(feed, {"rounds": 0}) == [0, 1, 2]
    assert ask(feed, {"rounds": 3}) == [3, 4]
