"""What a hub asks its sites: one question at a time for each, which the site fetches and answers."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

CHECK_S = 0.5
"""Seconds between two looks at the signal that aborts a job."""


@dataclass(frozen=True)
class Question:
    """A question to one site.

    Attributes:
        number: identifies the question; no two of a hub are equal.
        content: the question.
        max_answer_bytes: longest answer that the hub reads.
    """

    number: int
    content: bytes
    max_answer_bytes: int


class Mailboxes:
    """Holds the question to each site until the site has answered it, or its time is over.

    A site that does not fetch its question in time is absent: the hub waits no longer for it, neither in this exchange
    nor in later ones, until it fetches again. Only an exchange with absent sites alone waits for them once more.

    Args:
        sites: names of the hub's sites.
        fetch_s: seconds in which a site fetches its question.
    """

    def __init__(self, sites: Iterable[str], fetch_s: float):
        self.sites = frozenset(sites)
        self._fetch_s = fetch_s
        self._changed = threading.Condition()
        self._questions: dict[str, Question] = {}
        self._answers: dict[str, bytes] = {}
        self._fetched: set[str] = set()
        self._absent: set[str] = set()
        self._incoming: set[tuple[str, int]] = set()
        self._is_closed = False
        # Not from 0: an answer to a hub's process that has died must not fit a question of the next one.
        self._number = secrets.randbits(60)

    def ask(
        self,
        contents: Mapping[str, bytes],
        seconds: float,
        max_answer_bytes: int,
        transfer_s: float = 0.0,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> dict[str, bytes]:
        """Ask each site its question; return the answers that arrive in time.

        Args:
            contents: question by site.
            seconds: time in which an answer must begin to arrive.
            max_answer_bytes: longest answer.
            transfer_s: time after ``seconds`` in which an answer that has begun to arrive must end.
            is_aborted: whether to stop waiting.
        """
        start = time.monotonic()
        ends = (self._fetch_s, seconds, seconds + transfer_s)
        with self._changed:
            self._answers = {}
            self._fetched.clear()
            # Without this, a hub that lost all of its sites would fail every retry at once, before they are back.
            if self._absent >= contents.keys():
                self._absent -= contents.keys()
            for site, content in contents.items():
                self._number += 1
                self._questions[site] = Question(self._number, content, max_answer_bytes)
            self._changed.notify_all()
            while not is_aborted() and not self._is_closed:
                elapsed = time.monotonic() - start
                if not self._list_awaited(elapsed, *ends):
                    break
                remaining = min((end - elapsed for end in ends if end > elapsed), default=0.0)
                self._changed.wait(min(remaining, CHECK_S))
            # An answer after this is one to no question.
            self._questions.clear()
            answers, self._answers = self._answers, {}
        return answers

    def _list_awaited(self, elapsed: float, fetch_s: float, begin_s: float, end_s: float) -> set[str]:
        """Return the sites that the hub still waits for, after so many seconds of an exchange."""
        incoming = {site for site, question in self._questions.items() if (site, question.number) in self._incoming}
        if elapsed >= end_s:
            return set()
        if elapsed >= begin_s:
            for site in self._questions.keys() - incoming:
                del self._questions[site]
            return incoming
        if elapsed >= fetch_s:
            self._absent |= self._questions.keys() - self._fetched
        return self._questions.keys() - self._absent

    def find_question(self, site: str, number: int) -> Question | None:
        """Return the question of this number to a site; None if its time is over, or it is answered."""
        with self._changed:
            question = self._questions.get(site)
        return question if question is not None and question.number == number else None

    def begin_answer(self, site: str, number: int) -> bool:
        """Return whether an answer of a site to a question may be read: no other one is being read."""
        with self._changed:
            if (site, number) in self._incoming:
                return False
            self._incoming.add((site, number))
            return True

    def end_answer(self, site: str, number: int) -> None:
        """Say that an answer is no longer being read; it is accepted, or lost with its connection."""
        with self._changed:
            self._incoming.discard((site, number))
            self._changed.notify_all()

    def accept(self, site: str, number: int, content: bytes) -> None:
        """Accept a site's answer to a question; the first one counts, and one to no question is ignored."""
        with self._changed:
            question = self._questions.get(site)
            if question is not None and question.number == number:
                del self._questions[site]
                self._answers[site] = content
                self._changed.notify_all()

    def wait_for_question(self, site: str, seconds: float) -> Question | None:
        """Return the question to a site, as soon as there is one; None after ``seconds``.

        A question that was fetched and not answered is returned again: the site may have lost it with its connection.
        """
        with self._changed:
            self._absent.discard(site)
            self._changed.wait_for(lambda: self._is_closed or site in self._questions, seconds)
            question = None if self._is_closed else self._questions.get(site)
            if question is not None:
                self._fetched.add(site)
            return question

    def close(self) -> None:
        """End every wait, of the hub and of its sites."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
