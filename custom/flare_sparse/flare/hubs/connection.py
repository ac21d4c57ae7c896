"""The end of a site: it calls its hub over mutual TLS, fetches questions and hands answers over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc

from ...core.errors import RequestRefused
from .listener import CHUNK_BYTES, JOB, KEEPALIVE, METHOD, QUESTION, SIZE

_LOG = logging.getLogger(__name__)
PAUSE_S = 1.0
"""Seconds before a site calls a hub again that cannot be reached, or did not make it wait."""
STEP_S = 0.2
"""Seconds between two looks at the signal that stops a site."""


class HubConnection:
    """A site's connection to its hub, which is opened when it is needed.

    Args:
        hub: name of the hub; nothing is sent before the other end has shown its certificate.
        address: host and port.
        credentials: those of the site.
        job: id of the job in FLARE.
    """

    def __init__(self, hub: str, address: tuple[str, int], credentials: grpc.ChannelCredentials, job: str):
        self.hub, self._job = hub, job
        host, port = address
        options = [
            *KEEPALIVE,
            ("grpc.ssl_target_name_override", hub),
            # A hub is in the hospitals' own network, or open to it.
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 5000),
        ]
        self._channel = grpc.secure_channel(
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials, options
        )
        self._start = self._channel.stream_stream(METHOD)
        self._call: grpc.Call | None = None

    def exchange(self, key: str, answer: bytes) -> tuple[str, bytes] | None:
        """Hand an answer over and return the next question with its key; None: there is none now.

        An answer that the hub does not want any more is dropped.

        Args:
            key: key of the question that is answered; empty: there is no answer.
            answer: the answer.

        Raises:
            RequestRefused: the hub refuses this site.
            ConnectionError: the hub cannot be reached, or its certificate is another one; the same call may be made
                again.
        """
        chunks = (answer[start : start + CHUNK_BYTES] for start in range(0, len(answer), CHUNK_BYTES))
        metadata = ((JOB, self._job), *(((QUESTION, key), (SIZE, str(len(answer)))) if key else ()))
        call = self._call = self._start(chunks, metadata=metadata)
        try:
            content = b"".join(call)
        except grpc.RpcError as error:
            self._raise(error)
            return None
        found = dict(call.initial_metadata()).get(QUESTION)
        return None if found is None else (found, content)

    def _raise(self, error: grpc.RpcError) -> None:
        """Raise the error of a call; return where the hub alone did not want the answer."""
        code, reason = error.code(), error.details()
        if code == grpc.StatusCode.PERMISSION_DENIED:
            raise RequestRefused(
                f"{self.hub} refuses this site: federation.hubs of its copy of the job does not list it"
            ) from error
        if code == grpc.StatusCode.FAILED_PRECONDITION:
            raise ConnectionRefusedError(f"{self.hub} serves another job; its process may be about to end") from error
        if code not in (grpc.StatusCode.ABORTED, grpc.StatusCode.OUT_OF_RANGE):
            raise ConnectionError(f"{code.name}: {reason}") from error
        _LOG.warning("%s did not take an answer: %s", self.hub, reason)

    @contextmanager
    def stop_when(self, is_stopped: Callable[[], bool]) -> Iterator[None]:
        """End each call as soon as ``is_stopped``, and the connection at last."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(STEP_S):
                if is_stopped() and self._call is not None:
                    self._call.cancel()

        thread = threading.Thread(target=watch, name="hub connection", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()


def serve_hub(
    connection: HubConnection, answer_question: Callable[[bytes], bytes], is_stopped: Callable[[], bool]
) -> None:
    """Answer the questions of a hub until ``is_stopped``; while the hub cannot be reached, try again and again.

    Raises:
        RequestRefused: the hub refuses this site.
    """
    nothing = ("", b"")
    answer, handed_over, reported = nothing, nothing, ""
    with connection.stop_when(is_stopped):
        while not is_stopped():
            start, question = time.monotonic(), None
            try:
                question = connection.exchange(*answer)
            except ConnectionError as error:
                if str(error) != reported and not is_stopped():
                    _LOG.warning("%s cannot be reached: %s; see 'site preflight'. Trying again", connection.hub, error)
                    reported = str(error)
            else:
                handed_over = nothing if question is None else handed_over
            answer = nothing
            if question is None:
                _pause(start + PAUSE_S, is_stopped)
                continue
            # A question that comes again has lost its answer on the way.
            if question[0] != handed_over[0]:
                handed_over = question[0], answer_question(question[1])
            answer = handed_over


def _pause(end: float, is_stopped: Callable[[], bool]) -> None:
    while not is_stopped() and time.monotonic() < end:
        time.sleep(STEP_S)
