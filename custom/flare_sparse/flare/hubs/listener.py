"""The end of a hub: sites connect to it over mutual TLS, fetch questions and hand answers over.

A request of HTTP/1.1 carries the answer to the last question, if there was one, and its response the next question. The
number of the question is in the header ``Question``, the id of the job in the header ``Job``. Sites connect to the hub,
so that no site opens a port.
"""

from __future__ import annotations

import logging
import ssl
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from .mailboxes import Mailboxes, Question
from .open_connections import OpenConnection, OpenConnections
from .tls import read_common_name

_LOG = logging.getLogger(__name__)
NUMBER, JOB = "Question", "Job"
POLL_S = 5.0
"""Seconds that a hub waits for a question before it tells a site to ask again."""
IDLE_S = 60.0
"""Seconds without a byte after which a connection is closed."""
HANDSHAKE_S = 10.0
"""Seconds of a TLS handshake."""
CHUNK_BYTES = 2**20
"""Bytes of an answer that are read before the hub looks again whether it still wants the answer."""
_MAX_HEAD_BYTES = 2**16
_FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HubListener(TCPServer):
    """Serves the mailboxes of a hub to its sites, each connection in a thread of its own.

    Args:
        address: host and port to listen on; port 0: a free one.
        mailboxes: questions and answers.
        context: TLS context of the hub.
        job: id of the job in FLARE. A site of another job, such as one that waits for the end of this one, gets none.

    Raises:
        OSError: the address cannot be listened on.
    """

    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], mailboxes: Mailboxes, context: ssl.SSLContext, job: str):
        super().__init__(address, _Handler)
        self.mailboxes, self.context, self.job = mailboxes, context, job
        self._connections = OpenConnections(len(mailboxes.sites))
        self._has_warned = False
        self._thread = threading.Thread(target=self.serve_forever, name="hub", daemon=True)

    def start(self) -> None:
        """Serve in a thread of its own."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, end the open connections and wait for their threads."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        self.mailboxes.close()
        self._connections.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection in a thread of its own, or close it."""
        if not self._connections.start(request, partial(self._serve, request, client_address)):
            # Once: who fills the port must not fill the disk, too.
            if not self._has_warned:
                _LOG.warning("too many connections without a certificate of a site; new ones are closed")
                self._has_warned = True
            self.shutdown_request(request)

    def _serve(self, request: Any, client_address: Any, connection: OpenConnection) -> None:
        try:
            # The handshake is in this thread, so that a silent end delays no other.
            request.settimeout(HANDSHAKE_S)
            with self.context.wrap_socket(request, server_side=True, do_handshake_on_connect=False) as secured:
                self._connections.secure(connection, secured)
                secured.do_handshake()
                self._serve_identified(secured, client_address, connection)
        except Exception:  # noqa: BLE001 - one connection must not end the hub; a site connects again
            _LOG.debug("connection of %s ended", client_address, exc_info=True)
        finally:
            self.shutdown_request(request)

    def _serve_identified(self, secured: ssl.SSLSocket, client_address: Any, connection: OpenConnection) -> None:
        # The certificate names the site. A name in the request would be the sender's own word.
        site = read_common_name(secured)
        if site is None or site not in self.mailboxes.sites:
            _LOG.warning("a participant that is no site of this hub was refused")
            # One read and one reply: a stranger does not decide how long this thread lasts.
            secured.recv(_MAX_HEAD_BYTES)
            secured.sendall(_FORBIDDEN)
            return
        self._connections.identify(connection, site)
        secured.settimeout(IDLE_S)
        self.finish_request(secured, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HubListener

    def do_POST(self) -> None:
        """Take an answer, and give the next question."""
        mailboxes, site = self.server.mailboxes, str(read_common_name(self.connection))
        if self.headers.get(JOB) != self.server.job:
            self._reply(HTTPStatus.MISDIRECTED_REQUEST)
        elif (refusal := self._read_answer(site)) is not None:
            self._reply(refusal)
        else:
            question = mailboxes.wait_for_question(site, POLL_S)
            self._reply(HTTPStatus.NO_CONTENT if question is None else HTTPStatus.OK, question)

    def _read_answer(self, site: str) -> HTTPStatus | None:
        """Read the answer in a request; return why it is refused, or None."""
        size = self.headers.get("Content-Length", "")
        if size == "0":
            return None
        number, mailboxes = self.headers.get(NUMBER, ""), self.server.mailboxes
        # At most 20 digits: Python refuses to convert very long ones.
        if not all(text.isascii() and text.isdecimal() and len(text) <= 20 for text in (size, number)):
            return HTTPStatus.BAD_REQUEST
        question = mailboxes.find_question(site, int(number))
        if question is None:
            return HTTPStatus.CONFLICT
        # Before anything is read: a site decides how much it sends, and not how much memory a hub uses.
        if int(size) > question.max_answer_bytes:
            _LOG.warning("%s: an answer of %s bytes, at most %d are expected", site, size, question.max_answer_bytes)
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        # One at a time: a site with several connections must not fill the memory with copies of one answer.
        if not mailboxes.begin_answer(site, question.number):
            return HTTPStatus.TOO_MANY_REQUESTS
        try:
            return self._receive(site, question.number, int(size))
        finally:
            mailboxes.end_answer(site, question.number)

    def _receive(self, site: str, number: int, size: int) -> HTTPStatus | None:
        """Read the bytes of an answer as long as it is wanted; return why it is refused, or None."""
        mailboxes, content = self.server.mailboxes, bytearray()
        while len(content) < size:
            if mailboxes.find_question(site, number) is None:
                return HTTPStatus.CONFLICT
            chunk = self.rfile.read1(min(CHUNK_BYTES, size - len(content)))
            if not chunk:
                return HTTPStatus.BAD_REQUEST
            content += chunk
        mailboxes.accept(site, number, bytes(content))
        return None

    def _reply(self, status: HTTPStatus, question: Question | None = None) -> None:
        self.send_response_only(status)
        if question is not None:
            self.send_header(NUMBER, str(question.number))
        if status != HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(question.content) if question else 0))
        if status not in (HTTPStatus.OK, HTTPStatus.NO_CONTENT):
            # What follows in the connection is not read, so it cannot go on.
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if question is not None:
            self.wfile.write(question.content)
