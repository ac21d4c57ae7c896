"""The link between a hub and its sites: mutual TLS with the names of certificates, questions, answers, limits."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from pathlib import Path

import pytest
from hub_kits import Authority

from flare_sparse.core.errors import ConfigError, RequestRefused
from flare_sparse.flare.hubs.addresses import HUBS_FILE, find_address
from flare_sparse.flare.hubs.connection import HubConnection, serve_hub
from flare_sparse.flare.hubs.listener import HubListener
from flare_sparse.flare.hubs.mailboxes import Mailboxes
from flare_sparse.flare.hubs.tls import build_context

SITES = ("site-1", "site-2")


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Startup folders of a hub, its sites and another participant of one federation, and of a stranger."""
    folder, authority = tmp_path_factory.mktemp("kits"), Authority()
    for name in ("hub-1", *SITES, "site-9"):
        authority.write_kit(folder / name, name)
    Authority().write_kit(folder / "stranger", "site-1")
    return folder


@contextmanager
def open_hub(kits: Path) -> Iterator[tuple[Mailboxes, tuple[str, int]]]:
    mailboxes = Mailboxes(SITES, 60.0)
    listener = HubListener(("127.0.0.1", 0), mailboxes, build_context(kits / "hub-1", is_hub=True), "job-1")
    listener.start()
    try:
        yield mailboxes, ("127.0.0.1", int(listener.server_address[1]))
    finally:
        listener.close()


def connect(
    kits: Path, address: tuple[str, int], kit: str = "site-1", hub: str = "hub-1", job: str = "job-1"
) -> HubConnection:
    return HubConnection(hub, address, build_context(kits / kit, is_hub=False), job)


@contextmanager
def serve(connection: HubConnection, answer: Callable[[bytes], bytes]) -> Iterator[None]:
    """Answer the questions to a site in a thread."""
    stopped = threading.Event()
    thread = threading.Thread(target=serve_hub, args=(connection, answer, stopped.is_set))
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        connection.close()
        thread.join()


def test_each_site_answers_its_own_questions_one_after_another(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 0.05)
    with (
        open_hub(kits) as (mailboxes, address),
        serve(connect(kits, address, "site-1"), lambda question: b"1:" + question),
        serve(connect(kits, address, "site-2"), lambda question: b"2:" + question * 10**6),
    ):
        for text in (b"a", b"b"):
            answers = mailboxes.ask(dict.fromkeys(SITES, text), 10, 10**7)
            assert answers == {"site-1": b"1:" + text, "site-2": b"2:" + text * 10**6}
        assert mailboxes.ask({"site-2": b"c"}, 10, 10**7) == {"site-2": b"2:" + b"c" * 10**6}


def test_silent_site_costs_the_others_nothing_but_its_time(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 0.05)
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(2) as pool:
        asked = pool.submit(mailboxes.ask, dict.fromkeys(SITES, b"question"), 2.0, 100)
        connection = connect(kits, address)
        number, question = connection.exchange(0, b"") or (0, b"")
        assert question == b"question"
        # The response was lost with its connection: the same question comes again.
        connection.close()
        assert connection.exchange(0, b"") == (number, question)
        handed_over = pool.submit(connection.exchange, number, b"answer")
        assert asked.result() == {"site-1": b"answer"}
        connection.close()
        handed_over.cancel()


def test_site_of_another_job_gets_no_question_and_gives_no_answer(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 2.0, 100)
        other, own = connect(kits, address, job="job-2"), connect(kits, address)
        number, _ = own.exchange(0, b"") or (0, b"")
        for content in (b"", b"answer"):
            with pytest.raises(ConnectionRefusedError, match="hub-1 serves another job"):
                other.exchange(number, content)
            other.close()
        own.exchange(number, b"right")
        assert asked.result() == {"site-1": b"right"}
        own.close()


def test_answer_to_a_question_whose_time_is_over_is_dropped(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, {"site-1": b"early"}, 0.3, 100)
        connection = connect(kits, address)
        number, _ = connection.exchange(0, b"") or (0, b"")
        assert asked.result() == {}
        assert connection.exchange(number, b"late") is None
        asked = pool.submit(mailboxes.ask, {"site-1": b"next"}, 0.3, 100)
        assert (connection.exchange(number, b"late") or connection.exchange(0, b"") or (0, b""))[1] == b"next"
        assert asked.result() == {}
        connection.close()


def test_answer_longer_than_the_question_allows_is_not_read(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 0.5, 4)
        connection = connect(kits, address)
        number, _ = connection.exchange(0, b"") or (0, b"")
        assert connection.exchange(number, b"12345") is None
        assert asked.result() == {}
        connection.close()


def test_participant_that_is_no_site_of_the_hub_is_refused(kits: Path) -> None:
    with open_hub(kits) as (_, address), pytest.raises(RequestRefused, match="hub-1 refuses this site"):
        connect(kits, address, "site-9").exchange(0, b"")


def test_certificate_of_another_root_is_refused_by_either_end(kits: Path) -> None:
    with open_hub(kits) as (_, address), pytest.raises(OSError, match=r"(?i)certificate|ssl"):
        connect(kits, address, "stranger").exchange(0, b"")


def test_site_sends_nothing_to_another_participant_in_the_place_of_its_hub(kits: Path) -> None:
    with (
        open_hub(kits) as (_, address),
        pytest.raises(RequestRefused, match="is hub-1, not hub-2; correct its address"),
    ):
        connect(kits, address, hub="hub-2").exchange(0, b"secret")


def test_site_waits_for_a_hub_that_is_not_there(kits: Path) -> None:
    tries: list[None] = []

    def is_stopped() -> bool:
        tries.append(None)
        return len(tries) > 3

    serve_hub(connect(kits, ("127.0.0.1", 1)), lambda question: question, is_stopped)
    assert len(tries) > 3


def open_socket(kits: Path, address: tuple[str, int], kit: str = "site-1") -> ssl.SSLSocket:
    """Return a connection of a participant that sends what a test writes to it."""
    return build_context(kits / kit, is_hub=False).wrap_socket(socket.create_connection(address, 5))


def send_head(connection: ssl.SSLSocket, number: int, size: int) -> None:
    head = f"POST / HTTP/1.1\r\nJob: job-1\r\nQuestion: {number}\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode())


def fetch_number(connection: socket.socket) -> int:
    """Fetch the question to a site, and return its number."""
    send_head(connection, 0, 0)
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return int(response.headers["Question"])


def read_status(connection: ssl.SSLSocket) -> int:
    response = HTTPResponse(connection)
    response.begin()
    return response.status


def is_ended(connection: socket.socket, seconds: float) -> bool:
    """Whether the other end closes a connection within so many seconds, without a byte."""
    connection.settimeout(seconds)
    try:
        return not connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True


def test_silent_connections_are_limited_and_end_soon_and_sites_stay_connected(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.open_connections.MAX_UNIDENTIFIED", 3)
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.HANDSHAKE_S", 1.0)
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 0.01)
    with open_hub(kits) as (_, address), ExitStack() as stack:
        connection = connect(kits, address)
        assert connection.exchange(0, b"") is None
        threads, start = threading.active_count(), time.monotonic()
        silent = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(20)]
        assert [is_ended(one, 0.3) for one in silent[5:]] == [True] * 15
        assert threading.active_count() <= threads + 5
        # The site is served all the time; a new one only after the silent ends have had their time.
        assert connection.exchange(0, b"") is None
        assert [is_ended(one, 3.0) for one in silent[:5]] == [True] * 5
        assert time.monotonic() - start < 4
        other = connect(kits, address, "site-2")
        assert other.exchange(0, b"") is None
        connection.close()
        other.close()


def test_participant_that_is_no_site_keeps_no_connection(kits: Path) -> None:
    with open_hub(kits) as (_, address), open_socket(kits, address, "site-9") as connection:
        connection.sendall(b"P")
        assert read_status(connection) == 403
        assert is_ended(connection, 1.0)


def test_site_with_too_many_connections_loses_its_oldest_one(kits: Path) -> None:
    with open_hub(kits) as (_, address), ExitStack() as stack:
        own = [stack.enter_context(open_socket(kits, address)) for _ in range(5)]
        other = stack.enter_context(open_socket(kits, address, "site-2"))
        assert is_ended(own[0], 2.0)
        assert not is_ended(own[1], 0.2)
        assert not is_ended(other, 0.2)


def test_second_copy_of_an_answer_is_refused_before_it_is_read(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 10.0, 10**9)
        first, second = (stack.enter_context(open_socket(kits, address)) for _ in range(2))
        number = fetch_number(first)
        send_head(first, number, 6)
        first.sendall(b"ans")
        time.sleep(0.2)
        send_head(second, number, 10**9)
        assert read_status(second) == 429
        # A site that lost its connection tries again until the hub has noticed.
        third = connect(kits, address)
        with pytest.raises(ConnectionRefusedError, match="still reads this answer"):
            third.exchange(number, b"answer")
        third.close()
        first.sendall(b"wer")
        assert asked.result() == {"site-1": b"answer"}


def test_transfer_of_an_answer_ends_with_its_question(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 0.5, 100, 0.3)
        with open_socket(kits, address) as connection:
            number = fetch_number(connection)
            send_head(connection, number, 10)
            connection.sendall(b"12345")
            assert asked.result() == {}
            connection.sendall(b"6")
            assert read_status(connection) == 409


def test_large_answer_that_nothing_wants_any_more_does_not_stop_a_site(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub refuses it by closing the connection, which a site cannot tell from a lost one."""
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 0.05)
    late = threading.Event()
    contents: list[bytes] = []

    def answer(question: bytes) -> bytes:
        contents.append(question)
        if len(contents) == 1:
            late.wait(5)
            return b"late" * 10**7
        return b"in time"

    with open_hub(kits) as (mailboxes, address), serve(connect(kits, address), answer):
        assert mailboxes.ask({"site-1": b"first"}, 0.5, 10**9) == {}
        late.set()
        assert mailboxes.ask({"site-1": b"second"}, 10.0, 10**9) == {"site-1": b"in time"}
    assert contents == [b"first", b"second"]


def test_answer_that_was_lost_is_sent_again_without_another_training(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 0.05)
    exchange = HubConnection.exchange
    contents: list[bytes] = []

    def lose_first(self: HubConnection, number: int, content: bytes) -> tuple[int, bytes] | None:
        contents.append(content)
        if content and contents.count(content) == 1:
            raise ConnectionResetError
        return exchange(self, number, content)

    monkeypatch.setattr(HubConnection, "exchange", lose_first)
    with open_hub(kits) as (mailboxes, address):
        connection = connect(kits, address)
        with serve(connection, lambda question: question + str(len(contents)).encode()):
            answers = mailboxes.ask({"site-1": b"question"}, 10.0, 100)
    sent = [content for content in contents if content]
    assert sent == [answers["site-1"]] * 2


def test_site_does_not_hurry_a_hub_that_never_makes_it_wait(kits: Path) -> None:
    connection, times = connect(kits, ("127.0.0.1", 1)), []
    connection.exchange = lambda number, answer: times.append(time.monotonic())  # type: ignore[method-assign]
    deadline = time.monotonic() + 1.0
    serve_hub(connection, lambda question: question, lambda: time.monotonic() > deadline)
    assert 2 <= len(times) <= 4


def test_closed_hub_leaves_no_thread_and_no_connection(kits: Path) -> None:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        with open_hub(kits) as (_, address):
            waiting = stack.enter_context(open_socket(kits, address))
            send_head(waiting, 0, 0)
            idle = stack.enter_context(open_socket(kits, address, "site-2"))
            silent = stack.enter_context(socket.create_connection(address, 5))
            time.sleep(0.2)
            assert len(set(threading.enumerate()) - before) == 4
            start = time.monotonic()
        # One waits for a question, one for a request, one for a handshake, and one for connections.
        assert set(threading.enumerate()) <= before
        assert time.monotonic() - start < 2
        for connection in (idle, silent):
            assert is_ended(connection, 0.5)


def test_missing_kit_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"federation\.hubs: .*provisioned federation"):
        build_context(tmp_path, is_hub=False)


def test_address_of_a_hub_is_the_participants_own(tmp_path: Path) -> None:
    (tmp_path / HUBS_FILE).write_text("hub-1: hub-1.hospital.org:8110\nhub-2: 0.0.0.0:1\nhub-3: '[::1]:8110'\n")
    assert find_address(tmp_path, "hub-1") == ("hub-1.hospital.org", 8110)
    assert find_address(tmp_path, "hub-2") == ("0.0.0.0", 1)
    assert find_address(tmp_path, "hub-3") == ("::1", 8110)


@pytest.mark.parametrize(
    "text", ["host", "'host:'", ":8110", "host:70000", "user@host:8110", "host:8110/x", "8110", "[]"]
)
def test_malformed_address_is_refused_with_the_form(tmp_path: Path, text: str) -> None:
    (tmp_path / HUBS_FILE).write_text(f"hub-1: {text}\n")
    with pytest.raises(ConfigError, match=r"hub-1: expected HOST:PORT, such as hub-1\.hospital\.org:8110"):
        find_address(tmp_path, "hub-1")


def test_hub_without_an_address_at_this_participant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing; the job has hub-1\. Write a line 'hub-1: HOST:PORT'"):
        find_address(tmp_path, "hub-1")
    (tmp_path / HUBS_FILE).write_text("hub-2: host:8110\n")
    with pytest.raises(ConfigError, match=r"hub-1: no address; write a line"):
        find_address(tmp_path, "hub-1")
