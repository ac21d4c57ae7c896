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
        key: identifies the question, also after a restart of the hub.
        content: the question.
        max_answer_bytes: longest answer that the hub reads.
    """

    key: str
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
        self._transfers: dict[Callable[[], object], str] = {}
        self._is_closed = False

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
            self._answers, self._fetched = {}, set()
            # Without this, a hub that lost all of its sites would fail every retry at once, before they are back.
            if self._absent >= contents.keys():
                self._absent -= contents.keys()
            for site, content in contents.items():
                self._questions[site] = Question(secrets.token_hex(8), content, max_answer_bytes)
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
            transfers = list(self._transfers)
        # Not within the lock, which their end takes.
        for cancel in transfers:
            cancel()
        return answers

    def _list_awaited(self, elapsed: float, fetch_s: float, begin_s: float, end_s: float) -> set[str]:
        """Return the sites that the hub still waits for, after so many seconds of an exchange."""
        if elapsed >= end_s:
            return set()
        if elapsed >= begin_s:
            for site in self._questions.keys() - self._transfers.values():
                del self._questions[site]
            return set(self._questions)
        if elapsed >= fetch_s:
            self._absent |= self._questions.keys() - self._fetched
        return self._questions.keys() - self._absent

    def begin_answer(self, site: str, key: str, cancel: Callable[[], object]) -> Question | None:
        """Return the question that an answer may now be read to; None if its time is over, or it is answered.

        Args:
            site: name of the site.
            key: key of the question.
            cancel: ends the transfer of the answer, when its time is over.
        """
        with self._changed:
            question = self._questions.get(site)
            if question is None or question.key != key:
                return None
            self._transfers[cancel] = site
            return question

    def end_answer(
        self, site: str, question: Question, cancel: Callable[[], object], content: bytes | None = None
    ) -> None:
        """Accept an answer; None: it was lost. The first one counts, and one whose time is over is ignored."""
        with self._changed:
            del self._transfers[cancel]
            if content is not None and self._questions.get(site) is question:
                del self._questions[site]
                self._answers[site] = content
            self._changed.notify_all()

    def wait_for_question(
        self, site: str, seconds: float, is_active: Callable[[], bool] = lambda: True
    ) -> Question | None:
        """Return the question to a site, as soon as there is one; None after ``seconds``, or if not ``is_active``.

        A question that was fetched and not answered is returned again: the site may have lost it with its connection.
        """
        with self._changed:
            self._absent.discard(site)
            self._changed.wait_for(lambda: self._is_closed or site in self._questions or not is_active(), seconds)
            question = None if self._is_closed or not is_active() else self._questions.get(site)
            if question is not None:
                self._fetched.add(site)
            return question

    def wake(self) -> None:
        """Have every wait look again at what it waits for."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End every wait, of the hub and of its sites."""
        self._is_closed = True
        self.wake()
