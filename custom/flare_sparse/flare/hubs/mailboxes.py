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

    Args:
        sites: names of the hub's sites.
    """

    def __init__(self, sites: Iterable[str]):
        self.sites = frozenset(sites)
        self._changed = threading.Condition()
        self._questions: dict[str, Question] = {}
        self._answers: dict[str, bytes] = {}
        # Not from 0: an answer to a hub's process that has died must not fit a question of the next one.
        self._number = secrets.randbits(60)

    def ask(
        self,
        contents: Mapping[str, bytes],
        seconds: float,
        max_answer_bytes: int,
        is_aborted: Callable[[], bool] = lambda: False,
    ) -> dict[str, bytes]:
        """Ask each site its question; return the answers that arrive in time.

        Args:
            contents: question by site.
            seconds: time for the answers.
            max_answer_bytes: longest answer.
            is_aborted: whether to stop waiting.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            self._answers = {}
            for site, content in contents.items():
                self._number += 1
                self._questions[site] = Question(self._number, content, max_answer_bytes)
            self._changed.notify_all()
            while len(self._answers) < len(contents) and not is_aborted():
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, CHECK_S))
            # An answer after this is one to no question.
            self._questions.clear()
            answers, self._answers = self._answers, {}
        return answers

    def find_question(self, site: str, number: int) -> Question | None:
        """Return the question of this number to a site; None if its time is over, or it is answered."""
        with self._changed:
            question = self._questions.get(site)
        return question if question is not None and question.number == number else None

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
            self._changed.wait_for(lambda: site in self._questions, seconds)
            return self._questions.get(site)
