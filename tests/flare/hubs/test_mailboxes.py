"""Questions and answers of a hub without its connections: what is waited for, and how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from flare_sparse.flare.hubs.mailboxes import Mailboxes

SITES = ("site-1", "site-2")


def test_mailboxes_stop_waiting_when_the_job_is_aborted() -> None:
    assert Mailboxes(SITES, 60.0).ask({"site-1": b"question"}, 3600, 100, is_aborted=lambda: True) == {}


def test_first_answer_counts_and_a_number_fits_one_question_only() -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, dict.fromkeys(SITES, b"question"), 0.5, 100)
        first, second = (mailboxes.wait_for_question(site, 5.0) for site in SITES)
        assert first is not None
        assert second is not None
        assert first.number != second.number
        mailboxes.accept("site-2", first.number, b"of another site")
        mailboxes.accept("site-1", first.number, b"first")
        mailboxes.accept("site-1", first.number, b"second")
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


def fetch(mailboxes: Mailboxes, site: str) -> int:
    """Return the number of the next question to a site."""
    question = mailboxes.wait_for_question(site, 5.0)
    assert question is not None
    return question.number


def answer(mailboxes: Mailboxes, site: str) -> None:
    mailboxes.accept(site, fetch(mailboxes, site), b"answer")


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
    number = fetch(mailboxes, "site-2")
    answer(mailboxes, "site-1")
    time.sleep(0.5)
    mailboxes.accept("site-2", number, b"late")
    assert asked.result() == {"site-1": b"answer", "site-2": b"late"}


def test_absent_site_that_fetches_during_an_exchange_takes_part_in_it(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 0.1)
    asked = ask(mailboxes, 20.0)
    number = fetch(mailboxes, "site-1")
    time.sleep(0.3)
    second = fetch(mailboxes, "site-2")
    mailboxes.accept("site-1", number, b"answer")
    time.sleep(0.1)
    mailboxes.accept("site-2", second, b"back")
    assert asked.result() == {"site-1": b"answer", "site-2": b"back"}


def test_hub_without_any_site_waits_for_them_in_every_exchange(ask: Any) -> None:
    """Without the wait, each retry of the server would fail at once, before a site could be back."""
    mailboxes = Mailboxes(SITES, 0.2)
    for _ in range(2):
        assert 0.2 <= measure(lambda: ask(mailboxes, 20.0).result()) < 1.0


def test_answer_that_began_in_time_is_taken_and_another_one_is_not(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    asked = ask(mailboxes, 0.3, 5.0)
    first, second = (fetch(mailboxes, site) for site in SITES)
    assert mailboxes.begin_answer("site-1", first)
    time.sleep(0.6)
    # The time in which an answer may begin is over.
    assert mailboxes.find_question("site-2", second) is None
    assert mailboxes.find_question("site-1", first) is not None
    mailboxes.accept("site-1", first, b"answer")
    mailboxes.end_answer("site-1", first)
    assert measure(asked.result) < 1.0
    assert asked.result() == {"site-1": b"answer"}


def test_answer_whose_transfer_does_not_end_is_given_up(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    asked = ask(mailboxes, 0.1, 0.3)
    number = fetch(mailboxes, "site-1")
    assert mailboxes.begin_answer("site-1", number)
    assert 0.2 <= measure(asked.result) < 1.0
    assert asked.result() == {}
    assert mailboxes.find_question("site-1", number) is None


def test_one_answer_to_a_question_is_read_at_a_time() -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    assert mailboxes.begin_answer("site-1", 7)
    assert not mailboxes.begin_answer("site-1", 7)
    assert mailboxes.begin_answer("site-2", 7)
    mailboxes.end_answer("site-1", 7)
    assert mailboxes.begin_answer("site-1", 7)


def test_closed_mailboxes_end_every_wait(ask: Any) -> None:
    mailboxes = Mailboxes(SITES, 60.0)
    asked = ask(mailboxes, 60.0)
    fetch(mailboxes, "site-1")
    mailboxes.close()
    assert measure(asked.result) < 1.0
    assert measure(lambda: mailboxes.wait_for_question("site-2", 60.0)) < 1.0
