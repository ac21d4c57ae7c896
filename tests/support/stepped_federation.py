"""A federation whose server stops before each message and waits for the test to decide what happens to it."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from local_federation import LocalFederation, Upload
from toy import Toy, ToyBench

from flare_sparse.core.checkpoint.store import Store
from flare_sparse.core.errors import MissingBase, RoundFailed
from flare_sparse.privacy.secure_aggregation.stage import SumRules
from flare_sparse.rounds.endpoints.events import SERVER
from flare_sparse.rounds.endpoints.server import Attempt
from flare_sparse.rounds.endpoints.site import SiteMemory
from flare_sparse.rounds.federation.records import Outcome
from flare_sparse.rounds.federation.rules import RoundRules
from flare_sparse.wire.stage import PLAIN_STAGE, Reply

SITES = ("site-1", "site-2", "site-3")
WAIT_S = 300.0
"""Longer than a busy machine takes to import what torch's first optimiser needs."""
LOSS_WORDS = ("starts without it", "starts from zero")
"""What the log of a site says when its residual or the memory of its method is lost."""


class Killed(BaseException):
    """Ends the server's thread as a kill ends a process."""


class KillableStore(Store):
    """A store whose process is killed before or after it writes its next checkpoint."""

    dies: str | None = None

    def save(self, number: int, content: Any, also_keep: Collection[int | None] = ()) -> None:
        if self.dies == "before saving":
            raise Killed
        super().save(number, content, also_keep)
        if self.dies == "after saving":
            raise Killed


class LossLog(logging.Handler):
    """Counts the losses that sites report in their logs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += any(words in record.getMessage() for words in LOSS_WORDS)


class SteppedFederation(LocalFederation):
    """One life of the server's process, which runs in a thread of its own.

    Args:
        name: name of the method.
        values: number format on the wire, or ``masked`` for float32 that is summed.
        folder: folder of the checkpoints; None: none are written, and nothing can be resumed.
        rules: rules of the rounds; None: each needs all sites, in at most three attempts.
        settings: settings of the method.

    Attributes:
        memories: digest of the memory from which a site's last update to a request started, by site, kind and round.
        full_models: (site, sequence) of each request with the whole model.
        without_base: sites that replied that they lack the base of a request.
    """

    def __init__(
        self,
        name: str,
        values: Any,
        folder: Path | None,
        rules: RoundRules | None = None,
        personal: Any = (),
        **settings: Any,
    ):
        self.folder = folder
        self.server_store = KillableStore(folder / SERVER, {}) if folder else None
        rules = rules or RoundRules(min_sites=len(SITES), retries=2)
        super().__init__(
            name,
            ToyBench(Toy(), personal=personal),
            rules=rules,
            values="float32" if values == "masked" else values,
            stage=SumRules(8.0) if values == "masked" else PLAIN_STAGE,
            stores=self._open_store,
            **settings,
        )
        self.memories: dict[tuple[str, str, int], str] = {}
        self.full_models: list[tuple[str, int]] = []
        self.without_base: list[str] = []
        self.losses: Mapping[str, str] = {}
        self.change_update, self.change_message = self._record_memory, self._lose_upload
        self.is_silent = lambda site, attempt: self.losses.get(site) == "request lost"
        self._commands: queue.Queue[Callable[[Attempt], Mapping[str, Reply]]] = queue.Queue()
        self._events: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def _open_store(self, end: str) -> Store | None:
        if self.folder is None:
            return None
        return self.server_store if end == SERVER else Store(self.folder / end, {})

    def start(self, *, resume: bool) -> tuple[str, Any]:
        """Start the server and return its first event: see :meth:`wait`."""
        self._thread = threading.Thread(target=self._run, args=(resume,), daemon=True)
        self._thread.start()
        return self.wait()

    def wait(self) -> tuple[str, Any]:
        """Return the next event of the server: ``attempt``, ``finished``, ``failed``, ``killed`` or ``error``."""
        return self._events.get(timeout=WAIT_S)

    def proceed(self, losses: Mapping[str, str], dies: str | None = None) -> tuple[str, Any]:
        """Deliver the waiting attempt and return the server's next event.

        Args:
            losses: by site: ``request lost``, ``reply lost``, ``reply damaged``, ``update rejected`` or
                ``diverged``.
            dies: ``before saving`` or ``after saving``: the server is killed at its next checkpoint.
        """
        self.losses = losses
        self.encoded.clear()
        if self.server_store is not None:
            self.server_store.dies = dies
        self._commands.put(super().deliver)
        return self.wait()

    def kill(self) -> None:
        """Kill the server while an attempt waits."""

        def die(_attempt: Attempt) -> Mapping[str, Reply]:
            raise Killed

        self._commands.put(die)
        assert self.wait()[0] == "killed"

    def deliver(self, attempt: Attempt) -> Mapping[str, Reply]:
        """Announce an attempt, then do what the test decides."""
        requests = (line for line in self.ledger.lines if line.direction == "down")
        self.full_models += [
            (line.site, line.sequence)
            for line in requests
            if line.sequence == attempt.sequence and line.scalars_sent == line.scalars_total
        ]
        self._events.put(("attempt", attempt))
        replies = self._commands.get(timeout=WAIT_S)(attempt)
        self.without_base = [site for site, reply in replies.items() if isinstance(reply, MissingBase)]
        return replies

    def _run(self, resume: bool) -> None:
        # The number of threads is a setting of each thread.
        torch.set_num_threads(1)
        try:
            outcome: Outcome = self.run(resume=resume)
            self._events.put(("finished", outcome))
        except Killed:
            self._events.put(("killed", None))
        except RoundFailed as error:
            self._events.put(("failed", error))
        except BaseException as error:  # noqa: BLE001 - the test's thread reports it
            self._events.put(("error", error))

    def _record_memory(self, upload: Upload) -> Upload:
        memory = upload.endpoint._current.memory
        self.memories[upload.site, upload.request.kind, upload.request.round] = compute_memory_digest(memory)
        if self.losses.get(upload.site) == "update rejected" and upload.update.content in ("weights", "delta"):
            return upload.with_values(upload.update.patch.values * 1e4 + 1)
        return upload

    def _lose_upload(self, upload: Upload) -> Upload | str | None:
        loss = self.losses.get(upload.site)
        if loss == "reply damaged":
            upload.message[upload.message.size // 2] ^= 4
        if loss == "diverged":
            return "E_DIVERGED"
        return None if loss == "reply lost" else upload


def compute_memory_digest(memory: SiteMemory) -> str:
    """Return a digest of a memory; empty for a memory without a value other than zero."""
    tensors = {"residual": memory.residual, **memory.method}
    parts = {name: tensor for name, tensor in tensors.items() if tensor is not None and bool(tensor.any())}
    digest = hashlib.sha256()
    for name, tensor in sorted(parts.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest() if parts else ""
