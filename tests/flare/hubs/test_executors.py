"""The executors of a hub and of its sites, over real connections, with a stand-in for FLARE's engine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hub_kits import Authority
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReservedKey, ReservedTopic, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from flare_sparse.flare.hubs import executors
from flare_sparse.flare.hubs.addresses import HUBS_FILE
from flare_sparse.flare.hubs.executors import HubExecutor, HubSiteExecutor
from flare_sparse.flare.payload import (
    COLLECTION,
    JOIN,
    collection_to_shareable,
    extract_code,
    extract_collection,
    hello_to_shareable,
)
from flare_sparse.flare.workspace import JOB_FILE
from flare_sparse.rounds.federation.parcels import HELLO
from flare_sparse.wire.collection import Parcel, pack_collection, unpack_collection

JOB = (
    "name: hubs\nmethod: {name: fedsparsify}\ntask: {name: morphometry_age}\nwire: {aggregation: fixed_point}\n"
    "federation: {task_timeout_s: 5, hubs: {hub-1: {sites: [site-1]}}}\n"
)
HELLO_COLLECTION = pack_collection({"topic": HELLO}, [Parcel(("site-1",))])


class Client:
    """A client of FLARE: its startup kit, the folder of the job, and an engine that answers every task with a hello."""

    def __init__(self, folder: Path, name: str, authority: Authority):
        self.name, self.kit, self.tasks = name, folder / name, []
        self.kit.mkdir()
        authority.write_kit(self.kit / "startup", name)
        for part in ("local", "job"):
            (self.kit / part).mkdir()
        (self.kit / "job" / JOB_FILE).write_text(JOB)

    def build_context(self) -> Any:
        """Return FLARE's context of a task at this client."""
        workspace = SimpleNamespace(
            get_site_config_dir=lambda: str(self.kit / "local"),
            get_startup_kit_dir=lambda: str(self.kit / "startup"),
            get_app_config_dir=lambda job: str(self.kit / "job"),
            get_run_dir=lambda job: str(self.kit / "job"),
        )

        @contextmanager
        def new_context() -> Iterator[FLContext]:
            yield FLContext()

        engine = SimpleNamespace(
            get_workspace=lambda: workspace,
            get_component=lambda name: None,
            dispatch=self.dispatch,
            new_context=new_context,
        )
        peer = FLContext()
        peer.set_prop("run", "job", private=False, sticky=False)
        return SimpleNamespace(
            get_engine=lambda: engine,
            get_identity_name=lambda: self.name,
            get_job_id=lambda: "job",
            get_peer_context=lambda: peer,
            get_prop=lambda name, default=None: default,
        )

    def dispatch(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        self.tasks.append((topic, request.get_header("__task_name__"), request.get_peer_props()))
        return hello_to_shareable({"site": self.name})


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Client]:
    # FLARE's log methods send an event through the engine, which is a stand-in here.
    for log in ("log_info", "log_error"):
        monkeypatch.setattr(f"nvflare.apis.fl_component.FLComponent.{log}", lambda *arguments: None)
    monkeypatch.setattr(executors, "FREE_S", 0.2)
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 0.1)
    authority = Authority()
    return {name: Client(tmp_path, name, authority) for name in ("hub-1", "site-1")}


def set_port(clients: dict[str, Client], port: int) -> None:
    for client in clients.values():
        (client.kit / "local" / HUBS_FILE).write_text(f"hub-1: 127.0.0.1:{port}\n")


def find_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def execute(executor: Any, client: Client, task: str, data: Shareable | None = None) -> Shareable:
    reply = executor.execute(task, Shareable() if data is None else data, client.build_context(), Signal())
    assert isinstance(reply, Shareable)
    return reply


def test_collection_reaches_the_site_as_a_task_and_comes_back_with_its_reply(clients: dict[str, Client]) -> None:
    set_port(clients, find_port())
    hub, site, end = HubExecutor(), clients["site-1"], Signal()
    context = clients["hub-1"].build_context()
    hub.handle_event(EventType.START_RUN, context)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(HubSiteExecutor().execute, JOIN, Shareable(), site.build_context(), end)
        try:
            answer = extract_collection(
                execute(hub, clients["hub-1"], COLLECTION, collection_to_shareable(HELLO_COLLECTION))
            )
        finally:
            end.trigger(True)
            hub.handle_event(EventType.END_RUN, context)
        assert joined.result(10).get_return_code() == ReturnCode.OK
    _, (parcel,) = unpack_collection(answer, "hub-1")
    assert (parcel.sites, parcel.note) == (("site-1",), {"hello": {"site": "site-1"}})
    # FLARE's own way to run a task that comes as a message, with all filters, as the server's task.
    assert site.tasks == [(ReservedTopic.DO_TASK, "hello", {"run": "job"})]


def remove_address(clients: dict[str, Client]) -> None:
    (clients["hub-1"].kit / "local" / HUBS_FILE).unlink()


def remove_key(clients: dict[str, Client]) -> None:
    (clients["hub-1"].kit / "startup" / "client.key").unlink()


def rename(clients: dict[str, Client]) -> None:
    clients["hub-1"].name = "site-9"


@pytest.mark.parametrize("damage", [remove_address, remove_key, rename])
def test_hub_that_cannot_be_opened_refuses_collections_with_a_code_and_keeps_the_text(
    clients: dict[str, Client], damage: Callable[[dict[str, Client]], None]
) -> None:
    set_port(clients, find_port())
    damage(clients)
    hub = HubExecutor()
    hub.handle_event(EventType.START_RUN, clients["hub-1"].build_context())
    reply = execute(hub, clients["hub-1"], COLLECTION, collection_to_shareable(HELLO_COLLECTION))
    assert (reply.get_return_code(), extract_code(reply)) == (ReturnCode.EXECUTION_EXCEPTION, "E_CONFIG")
    assert "hub" in (clients["hub-1"].kit / "job" / "site_error.txt").read_text()


@pytest.mark.slow
def test_hub_waits_for_a_port_that_an_aborted_job_still_holds(
    clients: dict[str, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        set_port(clients, int(holder.getsockname()[1]))
        hub = HubExecutor()
        reply = execute(hub, clients["hub-1"], COLLECTION, collection_to_shareable(HELLO_COLLECTION))
        assert extract_code(reply) == "E_CONFIG"
        monkeypatch.setattr(executors, "FREE_S", 10.0)
        threading.Timer(0.3, holder.close).start()
        hub.handle_event(EventType.START_RUN, clients["hub-1"].build_context())
    assert hub._listener is not None
    hub.handle_event(EventType.END_RUN, clients["hub-1"].build_context())


@pytest.mark.slow
def test_aborted_job_does_not_wait_for_its_port(clients: dict[str, Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "FREE_S", 60.0)
    aborted, context = Signal(), clients["hub-1"].build_context()
    context.get_prop = {ReservedKey.RUN_ABORT_SIGNAL: aborted}.get
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        set_port(clients, int(holder.getsockname()[1]))
        threading.Timer(0.2, aborted.trigger, [True]).start()
        start = time.monotonic()
        HubExecutor().handle_event(EventType.START_RUN, context)
    assert 0.2 <= time.monotonic() - start < 2


@pytest.mark.parametrize("data", [Shareable(), collection_to_shareable(np.arange(9, dtype=np.uint8))])
def test_malformed_collection_is_refused_and_the_hub_goes_on(clients: dict[str, Client], data: Shareable) -> None:
    set_port(clients, find_port())
    hub = HubExecutor()
    reply = execute(hub, clients["hub-1"], COLLECTION, data)
    assert (reply.get_return_code(), extract_code(reply)) in [
        (ReturnCode.EXECUTION_EXCEPTION, code) for code in ("E_DTYPE", "E_LEN")
    ]
    hub.handle_event(EventType.END_RUN, clients["hub-1"].build_context())


def test_client_that_is_no_hub_opens_no_port(clients: dict[str, Client]) -> None:
    set_port(clients, find_port())
    hub = HubExecutor()
    hub.handle_event(EventType.START_RUN, clients["site-1"].build_context())
    assert hub._listener is None


def test_site_without_an_address_of_its_hub_refuses_to_join(clients: dict[str, Client]) -> None:
    reply = execute(HubSiteExecutor(), clients["site-1"], JOIN)
    assert (reply.get_return_code(), extract_code(reply)) == (ReturnCode.EXECUTION_EXCEPTION, "E_CONFIG")
    assert "HOST:PORT" in (clients["site-1"].kit / "job" / "site_error.txt").read_text()


def test_site_that_no_hub_lists_refuses_to_join(clients: dict[str, Client]) -> None:
    set_port(clients, find_port())
    clients["site-1"].name = "site-2"
    assert extract_code(execute(HubSiteExecutor(), clients["site-1"], JOIN)) == "E_CONFIG"
