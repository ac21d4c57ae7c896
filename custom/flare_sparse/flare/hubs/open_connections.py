"""The open connections of a hub, each with a thread; their number is limited, and they end with the listener."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

MAX_UNIDENTIFIED = 32
"""Most connections, besides one for each site, whose other end has not yet shown the certificate of a site."""
MAX_PER_SITE = 4
"""Most connections of a site. It needs one; those that it has lost stay open until the hub notices."""
JOIN_S = 10.0
"""Longest time that the end of all threads is waited for."""


@dataclass(eq=False)
class OpenConnection:
    """One connection.

    Attributes:
        socket: its socket, once TLS is set up that of TLS.
        site: site at the other end; None: not yet identified.
    """

    socket: socket.socket
    site: str | None = None


class OpenConnections:
    """Starts a thread for each connection, and ends them all.

    Whoever reaches the port may open connections, so those without a site's certificate have a limit of their own:
    they can keep new connections out, but not break those of sites, and not exhaust the memory of the hub.

    Args:
        num_sites: number of the hub's sites, which may all connect at the same time.
    """

    def __init__(self, num_sites: int) -> None:
        self._max_unidentified = MAX_UNIDENTIFIED + num_sites
        self._lock = threading.Lock()
        # In the order of their start.
        self._threads: dict[OpenConnection, threading.Thread] = {}
        self._is_closed = False

    def start(self, request: socket.socket, serve: Callable[[OpenConnection], None]) -> bool:
        """Serve a new connection in a thread of its own; return False if there are too many."""
        connection = OpenConnection(request)

        def run() -> None:
            try:
                serve(connection)
            finally:
                with self._lock:
                    del self._threads[connection]

        with self._lock:
            unidentified = sum(one.site is None for one in self._threads)
            if self._is_closed or unidentified >= self._max_unidentified:
                return False
            thread = threading.Thread(target=run, name="hub connection", daemon=True)
            self._threads[connection] = thread
            # Within the lock: what is in the table can be joined.
            thread.start()
        return True

    def secure(self, connection: OpenConnection, secured: socket.socket) -> None:
        """Note the socket that replaces a connection's first one.

        Raises:
            ConnectionAbortedError: the listener is closed.
        """
        with self._lock:
            connection.socket = secured
            if self._is_closed:
                raise ConnectionAbortedError("the hub is closed")

    def identify(self, connection: OpenConnection, site: str) -> None:
        """Note the site at the other end; the oldest connection of a site that has too many ends."""
        with self._lock:
            connection.site = site
            of_site = [one for one in self._threads if one.site == site]
            # Not the newest one: a site that lost its connections unnoticed must come back at once.
            for one in of_site[:-MAX_PER_SITE]:
                _end(one)

    def close(self) -> None:
        """End all connections, and wait for their threads."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
            for connection in self._threads:
                _end(connection)
        deadline = time.monotonic() + JOIN_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def _end(connection: OpenConnection) -> None:
    """Wake the thread of a connection with an error."""
    # The method of the plain socket: that of TLS would change an object that the thread uses.
    with suppress(OSError):
        socket.socket.shutdown(connection.socket, socket.SHUT_RDWR)
