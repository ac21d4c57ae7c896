"""The link between a hub and its sites: mutual TLS with the names of certificates, questions, answers, attacks."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hub_kits import Authority

from flare_sparse.core.errors import ConfigError, RequestRefused
from flare_sparse.flare.hubs.addresses import HUBS_FILE, find_address
from flare_sparse.flare.hubs.connection import HubConnection, serve_hub
from flare_sparse.flare.hubs.listener import METHOD, HubListener
from flare_sparse.flare.hubs.mailboxes import Mailboxes
from flare_sparse.flare.hubs.tls import build_context, build_server_credentials, build_site_credentials

SITES = ("site-1", "site-2")
Address = tuple[str, int]


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Startup folders of a hub, its sites and another participant of one federation, and of a stranger."""
    folder, authority = tmp_path_factory.mktemp("kits"), Authority()
    for name in ("hub-1", *SITES, "site-9"):
        authority.write_kit(folder / name, name)
    Authority().write_kit(folder / "stranger", "site-1")
    return folder


@pytest.fixture(autouse=True)
def poll_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 0.05)
    monkeypatch.setattr("flare_sparse.flare.hubs.connection.PAUSE_S", 0.1)


@contextmanager
def open_hub(kits: Path) -> Iterator[tuple[Mailboxes, Address]]:
    mailboxes = Mailboxes(SITES, 60.0)
    credentials = build_server_credentials(kits / "hub-1")
    listener = HubListener(("127.0.0.1", 0), mailboxes, credentials, "job-1")
    try:
        yield mailboxes, ("127.0.0.1", listener.port)
    finally:
        listener.close()


@contextmanager
def connect(
    kits: Path, address: Address, kit: str = "site-1", hub: str = "hub-1", job: str = "job-1"
) -> Iterator[HubConnection]:
    connection = HubConnection(hub, address, build_site_credentials(kits / kit), job)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def serve(kits: Path, address: Address, answer: Callable[[bytes], bytes], kit: str = "site-1") -> Iterator[None]:
    """Answer the questions to a site in a thread."""
    stopped = threading.Event()
    with connect(kits, address, kit) as connection:
        thread = threading.Thread(target=serve_hub, args=(connection, answer, stopped.is_set))
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()


def fetch(connection: HubConnection) -> tuple[str, bytes]:
    """Return key and content of the question to a site, once there is one."""
    deadline = time.monotonic() + 10
    while (question := connection.exchange("", b"")) is None:
        assert time.monotonic() < deadline
    return question


@pytest.mark.slow
def test_each_site_answers_its_own_questions_one_after_another(kits: Path) -> None:
    with (
        open_hub(kits) as (mailboxes, address),
        serve(kits, address, lambda question: b"1:" + question, "site-1"),
        serve(kits, address, lambda question: b"2:" + question * 10**7, "site-2"),
    ):
        for text in (b"a", b"b"):
            answers = mailboxes.ask(dict.fromkeys(SITES, text), 10, 10**8)
            assert answers == {"site-1": b"1:" + text, "site-2": b"2:" + text * 10**7}
        assert mailboxes.ask({"site-1": b"c" * 10**7}, 10, 10**8) == {"site-1": b"1:" + b"c" * 10**7}


@pytest.mark.slow
def test_silent_site_costs_the_others_nothing_but_its_time(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool, connect(kits, address) as connection:
        asked = pool.submit(mailboxes.ask, dict.fromkeys(SITES, b"question"), 2.0, 100)
        key, question = fetch(connection)
        assert question == b"question"
        # The response was lost with its connection: the same question comes again.
        with connect(kits, address) as other:
            assert fetch(other) == (key, question)
            assert other.exchange(key, b"answer") is None
        assert asked.result() == {"site-1": b"answer"}


def test_site_of_another_job_gets_no_question_and_gives_no_answer(kits: Path) -> None:
    with (
        open_hub(kits) as (mailboxes, address),
        ThreadPoolExecutor(1) as pool,
        connect(kits, address, job="job-2") as other,
        connect(kits, address) as own,
    ):
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 2.0, 100)
        key, _ = fetch(own)
        for number in ("", key):
            with pytest.raises(ConnectionRefusedError, match="hub-1 serves another job"):
                other.exchange(number, b"answer" if number else b"")
        own.exchange(key, b"right")
        assert asked.result() == {"site-1": b"right"}


@pytest.mark.slow
def test_answer_to_a_question_whose_time_is_over_is_dropped(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool, connect(kits, address) as connection:
        asked = pool.submit(mailboxes.ask, {"site-1": b"early"}, 0.3, 100)
        key, _ = fetch(connection)
        assert asked.result() == {}
        assert connection.exchange(key, b"late") is None
        asked = pool.submit(mailboxes.ask, {"site-1": b"next"}, 0.3, 100)
        assert connection.exchange(key, b"late") is None
        assert fetch(connection)[1] == b"next"
        assert asked.result() == {}


@pytest.mark.slow
def test_answer_longer_than_the_question_allows_is_not_accepted(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool, connect(kits, address) as connection:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 1.0, 4)
        key, _ = fetch(connection)
        # More than the windows of a connection hold: it ends before all of it was sent.
        assert connection.exchange(key, bytes(10**8)) is None
        assert asked.result() == {}


def test_participant_that_is_no_site_of_the_hub_is_refused(kits: Path) -> None:
    with (
        open_hub(kits) as (_, address),
        connect(kits, address, "site-9") as connection,
        pytest.raises(RequestRefused, match="hub-1 refuses this site"),
    ):
        connection.exchange("", b"")


@pytest.mark.slow
def test_certificate_of_another_root_is_refused_by_either_end(kits: Path) -> None:
    """The stranger does not accept the hub, and the hub does not accept a stranger that accepts it."""
    (kits / "mixed").mkdir(exist_ok=True)
    for file, source in (("rootCA.pem", "hub-1"), ("client.crt", "stranger"), ("client.key", "stranger")):
        (kits / "mixed" / file).write_bytes((kits / source / file).read_bytes())
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, {"site-1": b"secret"}, 1.0, 100)
        for kit in ("stranger", "mixed"):
            with connect(kits, address, kit) as connection, pytest.raises(ConnectionError, match="UNAVAILABLE"):
                connection.exchange("", b"")
        assert asked.result() == {}


def test_site_sends_nothing_to_another_participant_in_the_place_of_its_hub(kits: Path) -> None:
    with (
        open_hub(kits) as (_, address),
        connect(kits, address, hub="hub-2") as connection,
        pytest.raises(ConnectionError, match="Hostname Verification"),
    ):
        connection.exchange("", b"secret")


@pytest.mark.slow
def test_site_waits_for_a_hub_that_is_not_there_and_says_so_once(kits: Path, caplog: pytest.LogCaptureFixture) -> None:
    start = time.monotonic()
    with connect(kits, ("127.0.0.1", 1)) as connection:
        serve_hub(connection, lambda question: question, lambda: time.monotonic() > start + 1.0)
    assert 1.0 <= time.monotonic() - start < 3.0
    assert len([record for record in caplog.records if "hub-1 cannot be reached" in record.message]) == 1


@pytest.mark.slow
def test_stopped_site_ends_a_call_that_a_hub_does_not_end(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 60.0)
    start = time.monotonic()
    with open_hub(kits) as (_, address), connect(kits, address) as connection:
        serve_hub(connection, lambda question: question, lambda: time.monotonic() > start + 0.5)
    assert time.monotonic() - start < 3.0


def call_hub(
    stack: ExitStack,
    kits: Path,
    address: Address,
    chunks: Iterable[bytes],
    *metadata: tuple[str, str],
    kit: str = "site-1",
) -> Any:
    """Return a call of a participant that sends what a test gives it, over a connection of its own."""
    options = [("grpc.ssl_target_name_override", "hub-1"), ("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.secure_channel(f"127.0.0.1:{address[1]}", build_site_credentials(kits / kit), options)
    stack.callback(channel.close)
    return channel.stream_stream(METHOD)(iter(chunks), metadata=(("job", "job-1"), *metadata))


def is_ended(connection: socket.socket, seconds: float) -> bool:
    """Whether the other end closes a connection within so many seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1000):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.slow
def test_silent_connections_are_limited_and_end_soon_and_sites_stay_connected(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.MAX_CONNECTIONS", 10)
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.HANDSHAKE_S", 2.0)
    with open_hub(kits) as (_, address), ExitStack() as stack:
        connection = stack.enter_context(connect(kits, address))
        assert connection.exchange("", b"") is None
        threads = threading.active_count()
        silent = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(40)]
        # The site is served all the time; a new one after the silent ends have had their time.
        for _ in range(5):
            assert connection.exchange("", b"") is None
        assert threading.active_count() == threads
        assert [is_ended(one, 5.0) for one in silent] == [True] * 40
        other = stack.enter_context(connect(kits, address, "site-2"))
        assert other.exchange("", b"") is None


@pytest.mark.slow
def test_newest_call_of_a_site_ends_its_earlier_ones_and_no_others(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many calls of one site need no more threads than one."""
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 60.0)
    with open_hub(kits) as (mailboxes, address), ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        other = call_hub(stack, kits, address, (), kit="site-2")
        calls = []
        for _ in range(30):
            calls.append(call_hub(stack, kits, address, ()))
            time.sleep(0.02)
        assert [call.code() for call in calls[:-1]] == [grpc.StatusCode.CANCELLED] * 29
        asked = pool.submit(mailboxes.ask, dict.fromkeys(SITES, b"question"), 1.0, 100)
        assert [b"".join(call) for call in (calls[-1], other)] == [b"question"] * 2
        asked.result()


def drip(content: bytes, pause_s: float) -> Iterator[bytes]:
    for number in range(len(content)):
        yield content[number : number + 1]
        time.sleep(pause_s)


@pytest.mark.slow
def test_slow_answer_ends_with_its_question(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 1.0, 100, 0.5)
        key, _ = fetch(stack.enter_context(connect(kits, address)))
        slow = call_hub(stack, kits, address, drip(bytes(50), 0.1), ("question", key), ("size", "50"))
        start = time.monotonic()
        assert asked.result() == {}
        assert slow.code() == grpc.StatusCode.CANCELLED
        assert time.monotonic() - start < 3.0


def test_answer_that_ends_early_or_late_is_not_accepted(kits: Path) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 5.0, 100)
        connection = stack.enter_context(connect(kits, address))
        key, _ = fetch(connection)
        for size in ("7", "5", "six", ""):
            call = call_hub(stack, kits, address, [b"answer"], ("question", key), ("size", size))
            # The question is still open.
            assert b"".join(call) == b"question"
        connection.exchange(key, b"answer")
        assert asked.result() == {"site-1": b"answer"}


def test_calls_of_a_site_and_of_a_participant_that_is_none_do_not_fill_the_log(
    kits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_hub(kits) as (mailboxes, address), ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        asked = pool.submit(mailboxes.ask, {"site-1": b"question"}, 60.0, 4)
        connection = stack.enter_context(connect(kits, address))
        key, _ = fetch(connection)
        stranger = stack.enter_context(connect(kits, address, "site-9"))
        of_old_job = stack.enter_context(connect(kits, address, "site-2", job="job-0"))
        caplog.set_level(logging.DEBUG)
        logging.getLogger("flare_sparse.flare.hubs.connection").disabled = True
        stack.callback(setattr, logging.getLogger("flare_sparse.flare.hubs.connection"), "disabled", False)
        for _ in range(20):
            connection.exchange(key, b"too long")
            connection.exchange("0" * 1000, b"to no question")
            with pytest.raises(RequestRefused):
                stranger.exchange("", b"")
            with pytest.raises(ConnectionRefusedError):
                of_old_job.exchange("", b"")
        lines = [record.message for record in caplog.records if record.levelno >= logging.INFO]
        mailboxes.close()
        asked.result()
    assert sorted(lines) == [
        "a participant is no site of this hub, and was refused; later times are not logged",
        "site-1 sends an answer that is too long, and was refused; later times are not logged",
        "site-2 calls for another job, and was refused; later times are not logged",
    ]


def test_noise_on_the_port_ends_alone(kits: Path) -> None:
    with (
        open_hub(kits) as (_, address),
        ExitStack() as stack,
        connect(kits, address) as connection,
    ):
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\x16\x03\x01" + b"\xff" * 1000):
            plain = stack.enter_context(socket.create_connection(address, 5))
            plain.sendall(noise)
            assert is_ended(plain, 5.0)
        # Within TLS, with the certificate of a site.
        secured = build_context(kits / "site-1").wrap_socket(socket.create_connection(address, 5))
        stack.enter_context(secured).sendall(b"POST / HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n")
        assert is_ended(secured, 5.0)
        assert connection.exchange("", b"") is None


def test_port_of_a_hub_is_its_own(kits: Path) -> None:
    with open_hub(kits) as (_, address), pytest.raises(OSError, match="in use"):
        HubListener(address, Mailboxes(SITES, 60.0), build_server_credentials(kits / "hub-1"), "job-2")


@pytest.mark.slow
def test_large_answer_that_nothing_wants_any_more_does_not_stop_a_site(kits: Path) -> None:
    late = threading.Event()
    contents: list[bytes] = []

    def answer(question: bytes) -> bytes:
        contents.append(question)
        if len(contents) == 1:
            late.wait(5)
            return b"late" * 10**7
        return b"in time"

    with open_hub(kits) as (mailboxes, address), serve(kits, address, answer):
        assert mailboxes.ask({"site-1": b"first"}, 0.5, 10**9) == {}
        late.set()
        assert mailboxes.ask({"site-1": b"second"}, 10.0, 10**9) == {"site-1": b"in time"}
    assert contents == [b"first", b"second"]


def test_answer_that_was_lost_is_sent_again_without_another_training(
    kits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = HubConnection.exchange
    contents: list[bytes] = []

    def lose_first(self: HubConnection, key: str, content: bytes) -> tuple[str, bytes] | None:
        contents.append(content)
        if content and contents.count(content) == 1:
            raise ConnectionResetError
        return exchange(self, key, content)

    monkeypatch.setattr(HubConnection, "exchange", lose_first)
    with (
        open_hub(kits) as (mailboxes, address),
        serve(kits, address, lambda question: question + str(len(contents)).encode()),
    ):
        answers = mailboxes.ask({"site-1": b"question"}, 10.0, 100)
    assert [content for content in contents if content] == [answers["site-1"]] * 2


@pytest.mark.slow
def test_site_does_not_hurry_a_hub_that_never_makes_it_wait(kits: Path) -> None:
    times: list[float] = []
    with connect(kits, ("127.0.0.1", 1)) as connection:
        connection.exchange = lambda key, answer: times.append(time.monotonic())  # type: ignore[method-assign]
        deadline = time.monotonic() + 1.0
        serve_hub(connection, lambda question: question, lambda: time.monotonic() > deadline)
    assert 2 <= len(times) <= 10


def test_closed_hub_leaves_no_thread_and_no_connection(kits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare_sparse.flare.hubs.listener.POLL_S", 60.0)
    before = set(threading.enumerate())
    with ExitStack() as stack:
        with open_hub(kits) as (_, address):
            waiting = call_hub(stack, kits, address, ())
            half = call_hub(stack, kits, address, drip(bytes(100), 0.1), ("question", "0"), kit="site-2")
            silent = stack.enter_context(socket.create_connection(address, 5))
            idle = stack.enter_context(build_context(kits / "site-2").wrap_socket(socket.create_connection(address, 5)))
            time.sleep(0.3)
            start = time.monotonic()
        assert waiting.code() is not None
        assert half.code() == grpc.StatusCode.ABORTED
        assert time.monotonic() - start < 2
        for connection in (idle, silent):
            assert is_ended(connection, 2.0)
    deadline = time.monotonic() + 5
    while (left := {one for one in threading.enumerate() if one.is_alive()} - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_missing_kit_is_an_error_that_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"federation\.hubs: .*provisioned federation"):
        build_site_credentials(tmp_path)


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
