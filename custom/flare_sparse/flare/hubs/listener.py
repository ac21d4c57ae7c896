"""The end of a hub: a gRPC server, from which its sites fetch questions and to which they hand answers over.

A call carries the answer to the last question, if there was one, and its response the next question, both as streams of
chunks. The key of the question, the length of the answer and the id
of the job are metadata. Sites call the hub, so that no site opens a port.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc

from .mailboxes import Mailboxes

_LOG = logging.getLogger(__name__)
METHOD = "/flare_sparse.Hub/Exchange"
QUESTION, SIZE, JOB = "question", "size", "job"
"""Keys of metadata."""
POLL_S = 5.0
"""Seconds that a hub waits for a question before it tells a site to ask again."""
CHUNK_BYTES = 2**20
MAX_CONNECTIONS = 1024
"""Most open connections: strangers that reach the port must not use up the files of the process."""
HANDSHAKE_S = 10.0
"""Seconds of a TLS handshake."""
KEEPALIVE = [("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000)]
"""A call whose other end is gone ends after these 40 seconds."""


class HubListener:
    """Serves the mailboxes of a hub to its sites.

    Args:
        address: host and port to listen on; port 0: a free one.
        mailboxes: questions and answers.
        credentials: those of the hub.
        job: id of the job in FLARE. A site of another job, such as one that waits for the end of this one, gets none.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self, address: tuple[str, int], mailboxes: Mailboxes, credentials: grpc.ServerCredentials, job: str
    ) -> None:
        self._mailboxes, self._job = mailboxes, job
        self._calls: dict[str, grpc.ServicerContext] = {}
        self._reported: set[tuple[str, str]] = set()
        # A site's newest call ends its earlier one, which needs a thread until it notices.
        workers = 2 * len(mailboxes.sites) + 8
        self._pool = ThreadPoolExecutor(workers, "hub")
        service, _, method = METHOD[1:].partition("/")
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        options = [
            *KEEPALIVE,
            # Otherwise two processes could listen on one port, and share its sites.
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
            ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
            ("grpc.max_connection_idle_ms", 60_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ]
        self._server = grpc.server(
            self._pool,
            [grpc.method_handlers_generic_handler(service, {method: handler})],
            options=options,
            maximum_concurrent_rpcs=workers,
        )
        host, port = address
        # This says why an address cannot be listened on; gRPC does not.
        with socket.create_server(address, family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            pass
        try:
            self.port = self._server.add_secure_port(
                f"[{host}]:{port}" if ":" in host else f"{host}:{port}", credentials
            )
        except RuntimeError as error:
            raise OSError(errno.EADDRINUSE, str(error)) from error
        self._server.start()

    def close(self) -> None:
        """Stop listening, end all calls and connections, and wait for their threads."""
        self._mailboxes.close()
        self._server.stop(None).wait()
        self._pool.shutdown()

    def _exchange(self, chunks: Iterator[bytes], call: grpc.ServicerContext) -> Iterator[bytes]:
        # The certificate names the site. A name in the metadata would be the sender's own word.
        names = call.auth_context().get("x509_common_name", [])
        site = names[0].decode(errors="replace") if len(names) == 1 else ""
        if site not in self._mailboxes.sites:
            self._refuse(call, "a participant", grpc.StatusCode.PERMISSION_DENIED, "is no site of this hub")
        metadata = {key: value for key, value in call.invocation_metadata() if isinstance(value, str)}
        if metadata.get(JOB) != self._job:
            self._refuse(call, site, grpc.StatusCode.FAILED_PRECONDITION, "calls for another job")
        call.add_callback(self._mailboxes.wake)
        # A site needs one call at a time: an earlier one has lost its connection, and the hub has not noticed.
        earlier, self._calls[site] = self._calls.get(site), call
        if earlier is not None:
            earlier.cancel()
        if QUESTION in metadata:
            self._read_answer(site, metadata, chunks, call)
        question = self._mailboxes.wait_for_question(site, POLL_S, call.is_active)
        if question is None:
            return
        call.send_initial_metadata(((QUESTION, question.key),))
        for start in range(0, len(question.content), CHUNK_BYTES):
            yield question.content[start : start + CHUNK_BYTES]

    def _read_answer(
        self, site: str, metadata: Mapping[str, str], chunks: Iterator[bytes], call: grpc.ServicerContext
    ) -> None:
        """Read an answer, in memory of the length that its question allows, as long as the question is open."""
        question = self._mailboxes.begin_answer(site, metadata[QUESTION], call.cancel)
        if question is None:
            call.abort(grpc.StatusCode.ABORTED, "the question is not open any more")
            return
        content, is_whole = bytearray(), False
        try:
            for chunk in chunks:
                content += chunk
                if len(content) > question.max_answer_bytes:
                    self._refuse(call, site, grpc.StatusCode.OUT_OF_RANGE, "sends an answer that is too long")
            # The chunks of a call that was cancelled may end without an error.
            is_whole = metadata.get(SIZE) == str(len(content))
        finally:
            self._mailboxes.end_answer(site, question, call.cancel, bytes(content) if is_whole else None)

    def _refuse(self, call: grpc.ServicerContext, name: str, code: grpc.StatusCode, reason: str) -> None:
        # Once for each: a site decides how often it calls, and not how long the log of a hub becomes.
        if (name, reason) not in self._reported:
            self._reported.add((name, reason))
            _LOG.warning("%s %s, and was refused; later times are not logged", name, reason)
        call.abort(code, reason)
