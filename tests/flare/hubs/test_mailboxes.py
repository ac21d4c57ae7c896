"""Questions and answers of a hub without its connections: what is waited for, and how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from flare_sparse.flare.hubs.mailboxes import Mailboxes

SITES = ("site-1", "site-2")


def test_mailboxes_stop_waiting_when_the_job_is_aborted() -> None:
    assert Mailboxes(SITES, 60.0).ask({"site-1": b"question"}, 3600, 100, is_aborted=lambda: True) == {}


def hand_over(mailboxes: Mailboxes, site: str, key: str, content: bytes) -> bool:
    """Hand a whole answer over, and return whether the question was open."""
    question = mailboxes.begin_answer(site, key, cancel := object)
    if question is not None:
        mailboxes.end_answer(site, question, cancel, content)
    return question is not None


@pytest.mark.slow
def test_first_answer_counts_and_a_key_fits_one_question_only() -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, dict.fromkeys(SITES, b"question"), 0.5, 100)
        first, second = (fetch(mailboxes, site) for site in SITES)
        assert first != second
        taken = [
            hand_over(mailboxes, *answer)
            for answer in (
                ("site-2", first, b"of another site"),
                ("site-1", first, b"first"),
                ("site-1", first, b"second"),
            )
        ]
        assert taken == [False, True, False]
        assert asked.result() == {"site-1": b"first"}


@pytest.fixture
def ask() -> Any:
    """Ask both sites in a thread, with a question of 100 bytes at most."""
    with ThreadPoolExecutor(1) as pool:

        def start(mailboxes: Mailboxes, *times: float) -> Future[dict[str, bytes]]:
            return pool.submit(mailboxes.ask, dict.fromkeys(SITES, b"question"), times[0], 100, *times[1:])

        yield start


def measure(wait: Callable[[], Any]) -> float:
    start = time.monotonic()
    wait()
    return time.monotonic() - start


def fetch(mailboxes: Mailboxes, site: str) -> str:
    """Return the key of the next question to a site."""
    question = mailboxes.wait_for_question(site, 5.0)
    assert question is not None
    return question.key


def answer(mailboxes: Mailboxes, site: str) -> None:
    assert hand_over(mailboxes, site, fetch(mailboxes, site), b"answer")


@pytest.mark.slow
def test_site_that_fetches_nothing_is_missing_until_it_fetches_again(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 0.3)
    for allowed in ((0.25, 1.0), (0.0, 0.2)):
        asked = ask(mailboxes, 20.0)
        answer(mailboxes, "site-1")
        # The first exchange waits for the other site as long as it may take to fetch; the next one does not wait.
        assert allowed[0] <= measure(asked.result) < allowed[1]
        assert asked.result() == {"site-1": b"answer"}
    # It fetches, with or without a question: from then on it is waited for, longer than for a site that is absent.
    assert mailboxes.wait_for_question("site-2", 0.0) is None
    asked = ask(mailboxes, 20.0)
    key = fetch(mailboxes, "site-2")
    answer(mailboxes, "site-1")
    time.sleep(0.5)
    assert hand_over(mailboxes, "site-2", key, b"late")
    assert asked.result() == {"site-1": b"answer", "site-2": b"late"}


def test_absent_site_that_fetches_during_an_exchange_takes_part_in_it(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 0.1)
    asked = ask(mailboxes, 20.0)
    key = fetch(mailboxes, "site-1")
    time.sleep(0.3)
    second = fetch(mailboxes, "site-2")
    assert hand_over(mailboxes, "site-1", key, b"answer")
    time.sleep(0.1)
    assert hand_over(mailboxes, "site-2", second, b"back")
    assert asked.result() == {"site-1": b"answer", "site-2": b"back"}


def test_hub_without_any_site_waits_for_them_in_every_exchange(ask: Any) -> None:
    """Without the wait, each retry of the server would fail at once, before a site could be back."""
    mailboxes = Mailboxes(SITES, 0.2)
    for _ in range(2):
        assert 0.2 <= measure(lambda: ask(mailboxes, 20.0).result()) < 1.0


@pytest.mark.slow
def test_answer_that_began_in_time_is_taken_and_another_one_is_not(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    asked = ask(mailboxes, 0.3, 5.0)
    first, second = (fetch(mailboxes, site) for site in SITES)
    question = mailboxes.begin_answer("site-1", first, cancel := object)
    assert question is not None
    time.sleep(0.6)
    # The time in which an answer may begin is over.
    assert not hand_over(mailboxes, "site-2", second, b"late")
    mailboxes.end_answer("site-1", question, cancel, b"answer")
    assert measure(asked.result) < 1.0
    assert asked.result() == {"site-1": b"answer"}


def test_answer_whose_transfer_does_not_end_is_cancelled(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    asked = ask(mailboxes, 0.1, 0.3)
    cancelled = threading.Event()
    question = mailboxes.begin_answer("site-1", fetch(mailboxes, "site-1"), cancelled.set)
    assert question is not None
    assert 0.2 <= measure(asked.result) < 1.0
    assert cancelled.is_set()
    mailboxes.end_answer("site-1", question, cancelled.set, b"late")
    assert asked.result() == {}


@pytest.mark.slow
def test_answer_that_was_lost_with_its_connection_may_come_again(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    asked = ask(mailboxes, 1.0)
    key = fetch(mailboxes, "site-1")
    question = mailboxes.begin_answer("site-1", key, cancel := object)
    assert question is not None
    mailboxes.end_answer("site-1", question, cancel)
    assert fetch(mailboxes, "site-1") == key
    assert hand_over(mailboxes, "site-1", key, b"answer")
    assert asked.result() == {"site-1": b"answer"}


def test_closed_mailboxes_end_every_wait(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    asked = ask(mailboxes, 60.0)
    fetch(mailboxes, "site-1")
    mailboxes.close()
    assert measure(asked.result) < 1.0
    assert measure(lambda: mailboxes.wait_for_question("site-2", 60.0)) < 1.0
