"""Lines of a running job for an admin: only committed ones, and each once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext

from flare_sparse.flare import feed as feed_module
from flare_sparse.flare.feed import TOPIC, RecordFeed
from flare_sparse.wire.ledger import LedgerLine


def message(number: int) -> LedgerLine:
    return LedgerLine(
        "0" * 16, number, number, "site-1", "up", "train", "weights", "dense", "float32", 1, 1, 1, 0, 4, 4
    )


def ask(feed: RecordFeed, data: Any) -> tuple[list[int], list[int]]:
    """Return the rounds of the answer's lines of both files."""
    answer = feed.answer(TOPIC, data, FLContext())
    rounds, ledger = ([line["round"] for line in json.loads(answer[name])] for name in ("rounds", "ledger"))
    return rounds, ledger


def test_only_committed_lines_are_answered_and_only_new_ones() -> None:
    messages = [message(1), message(1)]
    feed = RecordFeed(messages)
    assert ask(feed, None) == ([], [])
    feed.commit({"round": 1})
    messages.append(message(2))
    assert ask(feed, {"rounds": 0, "ledger": 0}) == ([1], [1, 1])
    assert ask(feed, {"rounds": 1, "ledger": 1}) == ([], [1])
    feed.commit({"round": 2})
    assert ask(feed, {"rounds": 1, "ledger": 2}) == ([2], [2])


@pytest.mark.parametrize("data", ["all", {"rounds": -5, "ledger": "2"}, {"rounds": None}, [1]])
def test_malformed_question_counts_as_one_from_the_start(data: Any) -> None:
    feed = RecordFeed([message(1)])
    feed.commit({"round": 1})
    assert ask(feed, data) == ([1], [1])


def test_long_record_comes_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "MAX_LINES", 3)
    feed = RecordFeed([message(number) for number in range(5)])
    feed.commit({"round": 1})
    assert ask(feed, {"ledger": 0})[1] == [0, 1, 2]
    assert ask(feed, {"ledger": 3})[1] == [3, 4]
