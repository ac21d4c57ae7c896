"""The server's end of hubs: collections as FLARE tasks, and the sites that join their hubs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable

from flare_sparse.flare.hubs.carrier import HubCarrier
from flare_sparse.flare.payload import COLLECTION, JOIN, build_refusal, collection_to_shareable, extract_collection
from flare_sparse.rounds.federation import HubRules

COLLECTION_BYTES = np.arange(7, dtype=np.uint8)
HUBS = {"hub-1": HubRules(("site-1", "site-2")), "hub-2": HubRules(("site-3",))}


@dataclass
class Server:
    """A server whose clients answer at once."""

    clients: list[str] = field(default_factory=lambda: ["hub-1", "hub-2", "site-1", "site-3", "site-9"])
    sent: list[tuple[Task, list[str]]] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)

    def wait(self, tasks: list[Task]) -> None:
        for task in tasks:
            (hub,) = next(clients for sent, clients in self.sent if sent is task)
            self.log.append(f"{hub} has answered")
            if hub in self.results:
                self.deliver(task, hub, self.results[hub])

    def deliver(self, task: Task, client: str, result: Shareable) -> None:
        client_task: Any = SimpleNamespace(client=SimpleNamespace(name=client), result=result)
        task.result_received_cb(client_task=client_task, fl_ctx=None)
        assert client_task.result is None

    def build_carrier(self) -> HubCarrier:
        return HubCarrier(
            HUBS,
            lambda task, clients: self.sent.append((task, clients)),
            self.wait,
            lambda: self.log.append("fast polling"),
            lambda: self.clients,
            90.0,
            round,
        )

    def list_sent(self) -> list[tuple[str, list[str], int]]:
        return [(task.name, clients, task.timeout) for task, clients in self.sent]


def test_collection_is_sent_at_once_and_its_answer_is_awaited_later() -> None:
    server = Server(results={"hub-1": collection_to_shareable(COLLECTION_BYTES[::-1].copy())})
    carrier = server.build_carrier()
    waits = [carrier.links["hub-1"](COLLECTION_BYTES, 12.0), carrier.links["hub-2"](COLLECTION_BYTES, None)]
    assert server.list_sent() == [
        (JOIN, ["site-1"], 0),
        (COLLECTION, ["hub-1"], 12),
        (JOIN, ["site-3"], 0),
        (COLLECTION, ["hub-2"], 90),
    ]
    assert extract_collection(server.sent[1][0].data) is COLLECTION_BYTES
    assert all(waits)
    first, second = (wait() for wait in waits if wait)
    assert first is not None
    assert first.tolist() == COLLECTION_BYTES[::-1].tolist()
    assert second is None


def test_site_is_asked_to_join_once_and_again_after_it_has_left_or_connected() -> None:
    server = Server()
    carrier = server.build_carrier()
    carrier.links["hub-1"](COLLECTION_BYTES, 1.0)
    carrier.links["hub-1"](COLLECTION_BYTES, 1.0)
    assert [clients for task, clients in server.sent if task.name == JOIN] == [["site-1"]]
    first = server.sent[0][0]
    server.deliver(first, "site-1", build_refusal("E_CONFIG", ReturnCode.EXECUTION_EXCEPTION))
    first.completion_status = TaskCompletionStatus.OK
    server.clients.append("site-2")
    carrier.links["hub-1"](COLLECTION_BYTES, 1.0)
    assert [clients for task, clients in server.sent if task.name == JOIN] == [["site-1"], ["site-1"], ["site-2"]]


def test_hub_that_is_not_connected_has_no_answer_and_its_sites_are_not_asked() -> None:
    server = Server(clients=["hub-2", "site-1"])
    assert server.build_carrier().links["hub-1"](COLLECTION_BYTES, 1.0) is None
    assert server.sent == []


def test_idle_clients_poll_fast_at_both_ends_of_an_exchange_and_not_after_each_hub() -> None:
    server = Server()
    carrier = server.build_carrier()
    for _ in range(2):
        waits = [carrier.links[hub](COLLECTION_BYTES, 1.0) for hub in ("hub-1", "hub-2")]
        for wait in waits:
            assert wait is not None
            wait()
    assert server.log == ["fast polling", "hub-1 has answered", "hub-2 has answered", "fast polling"] * 2


@pytest.mark.parametrize("result", [build_refusal("E_CONFIG", ReturnCode.EXECUTION_EXCEPTION), Shareable()])
def test_refusal_of_a_hub_is_no_answer(result: Shareable, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(results={"hub-1": result})
    wait = server.build_carrier().links["hub-1"](COLLECTION_BYTES, 1.0)
    assert wait is not None
    assert wait() is None
    assert "hub hub-1 refused" in caplog.text
