"""The link between a hub and its sites: mutual TLS with the names of certificates, questions, answers, limits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_kits import Authority

from flare_sparse.errors import ConfigError, RequestRefused
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
    mailboxes = Mailboxes(SITES)
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


def test_mailboxes_stop_waiting_when_the_job_is_aborted() -> None:
    assert Mailboxes(SITES).ask({"site-1": b"question"}, 3600, 100, lambda: True) == {}


def test_first_answer_counts_and_a_number_fits_one_question_only() -> None:
    mailboxes = Mailboxes(SITES)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(mailboxes.ask, dict.fromkeys(SITES, b"question"), 0.5, 100)
        first, second = (mailboxes.wait_for_question(site, 5.0) for site in SITES)
        assert first is not None
        assert second is not None
        assert first.number != second.number
        mailboxes.accept("site-2", first.number, b"of another site")
        mailboxes.accept("site-1", first.number, b"first")
        mailboxes.accept("site-1", first.number, b"second")
        assert asked.result() == {"site-1": b"first"}


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
