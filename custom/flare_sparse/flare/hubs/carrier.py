"""The server's end of hubs: collections as FLARE tasks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from ...rounds.federation import HubRules, Link
from ...rounds.federation.tree import Wait
from ..payload import COLLECTION, JOIN, collection_to_shareable, extract_collection, get_refusal_code

_LOG = logging.getLogger(__name__)


class HubCarrier:
    """Carries collections to hubs, and lets their sites join them.

    Args:
        hubs: rules of each hub.
        broadcast: starts a FLARE task for the clients of these names.
        wait: waits until FLARE tasks are complete.
        restart_polling: begins again at the shortest interval between two requests of idle clients for work.
        list_clients: returns the names of the connected clients.
        timeout_s: seconds of a collection for which the server sets none.
        to_timeout: converts seconds to a timeout of FLARE.
    """

    def __init__(
        self,
        hubs: Mapping[str, HubRules],
        broadcast: Callable[[Task, list[str]], None],
        wait: Callable[[list[Task]], None],
        restart_polling: Callable[[], None],
        list_clients: Callable[[], Sequence[str]],
        timeout_s: float,
        to_timeout: Callable[[float], int],
    ):
        self.hubs = hubs
        self._broadcast, self._wait, self._list_clients = broadcast, wait, list_clients
        self._restart_polling = restart_polling
        self._timeout_s, self._to_timeout = timeout_s, to_timeout
        self._joins: dict[str, Task] = {}
        self._awaited: set[str] = set()

    @property
    def links(self) -> dict[str, Link]:
        """How each hub is reached."""
        return {hub: partial(self._send, hub) for hub in self.hubs}

    def _send(self, hub: str, collection: np.ndarray, seconds: float | None) -> Wait | None:
        clients = set(self._list_clients())
        if hub not in clients:
            _LOG.warning("hub %s is not connected", hub)
            return None
        self._let_join(hub, clients)
        answers: list[np.ndarray] = []

        # It must not raise: FLARE would end the task with an error. FLARE passes keyword arguments.
        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            result, client_task.result = client_task.result, None
            answer = extract_collection(result) if result.get_return_code() == ReturnCode.OK else None
            if answer is None:
                _LOG.warning("hub %s refused: %s", hub, get_refusal_code(result))
            else:
                answers.append(answer)

        timeout = self._to_timeout(self._timeout_s if seconds is None else seconds)
        task = Task(COLLECTION, collection_to_shareable(collection), timeout=timeout, result_received_cb=receive)
        if not self._awaited:
            self._restart_polling()
        self._awaited.add(hub)
        self._broadcast(task, [hub])

        def wait() -> np.ndarray | None:
            self._wait([task])
            self._awaited.discard(hub)
            # After the last hub only: an answer of one hub brings no work, and each restart costs every idle client
            # some 100 requests.
            if not self._awaited:
                self._restart_polling()
            return answers[0] if answers else None

        return wait

    def _let_join(self, hub: str, clients: set[str]) -> None:
        """Ask the connected sites of a hub that have not joined it, or have left it, to join it."""

        def receive(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            code = get_refusal_code(client_task.result)
            _LOG.warning("%s has left hub %s: %s", client_task.client.name, hub, code)
            client_task.result = None

        for site in self.hubs[hub].sites:
            task = self._joins.get(site)
            if site in clients and (task is None or task.completion_status is not None):
                # No timeout: the task of a site lasts as long as the job.
                self._joins[site] = Task(JOIN, Shareable(), timeout=0, result_received_cb=receive)
                self._broadcast(self._joins[site], [site])
