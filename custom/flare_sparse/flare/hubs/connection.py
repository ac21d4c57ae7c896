"""The end of a site: it connects to its hub over mutual TLS, fetches questions and hands answers over."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection

from ...core.errors import RequestRefused
from .listener import IDLE_S, JOB, NUMBER
from .tls import read_common_name

_LOG = logging.getLogger(__name__)
PAUSES_S = (0.2, 5.0)
"""First and longest pause before a site connects again."""
STEP_S = 0.2
"""Seconds between two looks at the signal that stops a pause."""


class HubConnection:
    """A site's connection to its hub, which is opened when it is needed.

    Args:
        hub: name of the hub; the other end must have its certificate.
        address: host and port.
        context: TLS context of the site.
        job: id of the job in FLARE.
    """

    def __init__(self, hub: str, address: tuple[str, int], context: ssl.SSLContext, job: str):
        self.hub, self._job = hub, job
        self._connection = HTTPSConnection(*address, context=context, timeout=IDLE_S)
        # Opened by _open alone, which checks the other end.
        self._connection.auto_open = 0

    def exchange(self, number: int, answer: bytes) -> tuple[int, bytes] | None:
        """Hand an answer over and return the next question with its number; None: there is none now.

        An answer that the hub does not want any more is dropped.

        Args:
            number: number of the question that is answered.
            answer: the answer; empty: there is none.

        Raises:
            RequestRefused: the other end is not the hub, or the hub refuses this site.
            OSError, HTTPException: the hub cannot be reached; the same call may be made again.
        """
        if self._connection.sock is None:
            self._open()
        headers = {JOB: self._job, NUMBER: str(number), "Content-Length": str(len(answer))}
        self._connection.request("POST", "/", answer, headers)
        response = self._connection.getresponse()
        content = response.read()
        if response.status == HTTPStatus.OK:
            return int(response.headers.get(NUMBER, "0")), content
        if response.status == HTTPStatus.FORBIDDEN:
            raise RequestRefused(
                f"{self.hub} refuses this site: federation.hubs of its copy of the job does not list it"
            )
        if response.status == HTTPStatus.MISDIRECTED_REQUEST:
            raise ConnectionRefusedError(f"{self.hub} serves another job; its process may be about to end")
        if response.status == HTTPStatus.TOO_MANY_REQUESTS:
            # An earlier connection broke, and the hub has not noticed; it keeps the question until then.
            raise ConnectionRefusedError(f"{self.hub} still reads this answer from another connection")
        if response.status != HTTPStatus.NO_CONTENT:
            _LOG.warning("%s did not take an answer: status %d", self.hub, response.status)
        return None

    def close(self) -> None:
        """Close the connection; the next exchange opens it again."""
        self._connection.close()

    def _open(self) -> None:
        self._connection.connect()
        name = read_common_name(self._connection.sock)
        # Before a byte is sent: whoever listens there must be the hub that the job names.
        if name != self.hub:
            self.close()
            raise RequestRefused(f"the other end of the connection is {name}, not {self.hub}; correct its address")


def serve_hub(
    connection: HubConnection, answer_question: Callable[[bytes], bytes], is_stopped: Callable[[], bool]
) -> None:
    """Answer the questions of a hub until ``is_stopped``; while the hub cannot be reached, try again and again.

    Raises:
        RequestRefused: the other end is not the hub, or the hub refuses this site.
    """
    number, answer, pause = 0, b"", PAUSES_S[0]
    unsent: tuple[int, bytes] | None = None
    try:
        while not is_stopped():
            start = time.monotonic()
            try:
                question = connection.exchange(number, answer)
            except (OSError, HTTPException) as error:
                connection.close()
                _LOG.warning(
                    "%s cannot be reached: %s; next try in %.1f s", connection.hub, type(error).__name__, pause
                )
                # Not sent again at once: the hub may have refused it by closing the connection, and the site would
                # never learn that. A question that is still open comes again.
                unsent = (number, answer) if answer else unsent
                number, answer = 0, b""
                pause = _pause(pause, is_stopped)
                continue
            number, answer = 0, b""
            if question is None:
                unsent = None
                # A hub makes a site wait for a question; one that does not must not make it busy.
                pause = _pause(pause, is_stopped) if time.monotonic() - start < PAUSES_S[0] else PAUSES_S[0]
                continue
            pause, asked_at = PAUSES_S[0], time.monotonic()
            if unsent is not None and unsent[0] == question[0]:
                number, answer = unsent
            else:
                number, answer = question[0], answer_question(question[1])
            unsent = None
            # The hub closes a connection that has been silent for so long.
            if time.monotonic() - asked_at > IDLE_S / 2:
                connection.close()
    finally:
        connection.close()


def _pause(seconds: float, is_stopped: Callable[[], bool]) -> float:
    """Wait until ``is_stopped``, or for so many seconds; return the seconds of the next pause."""
    _sleep(seconds, is_stopped)
    return min(2 * seconds, PAUSES_S[1])


def _sleep(seconds: float, is_stopped: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not is_stopped() and time.monotonic() < deadline:
        time.sleep(STEP_S)
