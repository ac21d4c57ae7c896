"""A TCP proxy on loopback that can reset its connections and refuse new ones for a while."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress


class Proxy:
    """Forwards ``port`` to ``target``, both on localhost, in its own thread."""

    def __init__(self, port: int, target: int):
        self._port, self._target = port, target
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_refusing = False
        self.passed_bytes = 0
        self.cuts = 0
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), daemon=True).start()
        if not started.wait(10):
            raise OSError(f"no proxy on port {port}")

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_server(self._accept, "localhost", self._port))
        started.set()
        self._loop.run_forever()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_refusing:
            writer.transport.abort()
            return
        onward, out = await asyncio.open_connection("localhost", self._target)
        self._writers |= {writer, out}
        await asyncio.gather(self._pump(reader, out), self._pump(onward, writer))
        self._writers -= {writer, out}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
                self.passed_bytes += len(data)
        writer.close()

    def cut(self, seconds: float = 0.0) -> int:
        """Reset every connection and refuse new ones for ``seconds``; return how many were reset."""
        return asyncio.run_coroutine_threadsafe(self._cut(seconds), self._loop).result(10)

    async def _cut(self, seconds: float) -> int:
        self._is_refusing = seconds > 0
        cut = len(self._writers)
        for writer in list(self._writers):
            writer.transport.abort()
        self.cuts += cut
        if seconds:
            self._loop.call_later(seconds, self._accept_again)
        return cut

    def _accept_again(self) -> None:
        self._is_refusing = False
