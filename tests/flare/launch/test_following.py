"""The command that follows a job: what it asks the server, what it prints, and how it outlives a dead server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.flare_api.api_spec import (
    AuthenticationError,
    JobNotFound,
    JobNotRunning,
    NoConnection,
    SessionClosed,
)
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.controller import READY, RESULTS, STATS, FederatedController
from flare_sparse.flare.launch import connection as connection_module
from flare_sparse.flare.launch import submission
from flare_sparse.flare.launch.connection import RECONNECT_S, RETRY_S, JobFailed, ServerConnection
from flare_sparse.flare.launch.submission import DROPPED, JobFollower, is_dropped, is_lost
from flare_sparse.results.runs.progress import Printer
from flare_sparse.results.runs.record import GrowingRecord

LINE = "round {}/9  3/3 sites  4.0 kB  1.0 s"


def build_line(number: int, **fields: Any) -> dict[str, Any]:
    """Return a line of ``rounds.jsonl``."""
    sites = ["site-1", "site-2", "site-3"]
    return {
        "round": number,
        "rounds": 9,
        "sequence": number,
        "kind": "train",
        "seconds": 1.0,
        "metrics": {},
        "sites_asked": sites,
        "sites_contributed": sites,
        "rejected": {},
        "timed_out": [],
        "events": [],
        "metric": "accuracy",
        "unit": "",
        "bytes_up": 2000,
        "bytes_down": 2000,
        "dense_bytes": 0,
        **fields,
    }


def pack(rounds: list[dict[str, Any]]) -> str:
    """Return the lines of rounds as the controller's statistics hold them."""
    context = FLContext()
    collector = GroupInfoCollector()
    context.set_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR, collector)
    controller = FederatedController("fedavg", "toy", {})
    controller._lines = rounds
    controller.handle_event(InfoCollector.EVENT_TYPE_GET_STATS, context)
    packed: str = collector.info[STATS]["record"]
    return packed


class FakeServer:
    """A FLARE server whose job goes through ``script``: each poll of the status takes the next step.

    A step is a status, or an exception that every request raises until the next login.
    """

    def __init__(self, *script: str | type[Exception], log: str = READY, rounds: int = 0, started: float = 1.0):
        self.script: Iterator[str | type[Exception]] = iter(script)
        self.log, self.started, self.running = log, started, True
        self.rounds = [build_line(number) for number in range(1, rounds + 1)]
        self.clients: dict[str, list[dict[str, str]]] = {}
        self.requests: list[str] = []
        self.failure: type[Exception] | None = None

    def log_in(self, *_arguments: Any, **_options: Any) -> FakeServer:
        self.requests.append("login")
        self.failure = None
        return self

    def close(self) -> None:
        self.requests.append("logout")

    def get_job_status(self, job: str) -> str:
        assert job == "J"
        if self.failure is None:
            step = next(self.script)
            if isinstance(step, str):
                return step
            self.failure = step
        raise self.failure("cannot connect to server")

    def get_job_meta(self, job: str) -> dict[str, Any]:
        return {"job_id": job, "status": "RUNNING", "submit_time": 2.0}

    def get_job_logs(self, job: str, target: str) -> dict[str, Any]:
        assert (job, target) == ("J", "server")
        self.requests.append("log")
        return {"logs": {"server": self.log}}

    def show_stats(self, job: str, target: str) -> dict[str, Any]:
        assert (job, target) == ("J", "server")
        self.requests.append("lines")
        if not self.running:
            raise JobNotRunning(f"job {job} is not running")
        return {"server": {STATS: {"record": pack(self.rounds)}}}

    def get_system_info(self) -> Any:
        jobs = [SimpleNamespace(job_id="J")] if self.running else []
        clients = [SimpleNamespace(name=name) for name in self.clients]
        server = SimpleNamespace(start_time=self.started)
        return SimpleNamespace(server_info=server, job_info=jobs, client_info=clients)

    def get_client_job_status(self, names: list[str]) -> list[dict[str, str]]:
        return [{"client_name": name, **entry} for name in names for entry in self.clients[name]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that sleeping moves on."""
    time = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: time.now, sleep=lambda s: setattr(time, "now", time.now + s))
    for module in (connection_module, submission):
        monkeypatch.setattr(module, "time", fake)
    return time


def connect(server: FakeServer, monkeypatch: pytest.MonkeyPatch, folder: Path, lines: list[str]) -> ServerConnection:
    (folder / "startup").mkdir()
    admin = {"admin": {"username": "lead", "host": "centre", "port": 8003}}
    (folder / "startup" / "fed_admin.json").write_text(json.dumps(admin))
    monkeypatch.setattr(connection_module, "new_secure_session", server.log_in)
    return ServerConnection(folder, lines.append)


def follow(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, folder: Path, **options: Any
) -> tuple[str | JobFailed, list[str]]:
    lines: list[str] = []
    connection = connect(server, monkeypatch, folder, lines)
    follower = JobFollower(connection, "J", Printer(lines.append), GrowingRecord(folder / "out"), **options)
    try:
        return follower.follow(), lines
    except JobFailed as error:
        return error, lines


pytestmark = pytest.mark.usefixtures("clock")


def test_lines_are_read_only_after_the_job_has_logged_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FLARE calls a job RUNNING seconds before its process can answer; each question until then is a traceback."""
    server = FakeServer("SUBMITTED", "RUNNING", "RUNNING", "RUNNING", "FINISHED:COMPLETED", log="")

    def get_job_logs(job: str, target: str) -> dict[str, Any]:
        server.requests.append("log")
        return {"logs": {"server": READY} if server.requests.count("log") > 2 else {}}

    monkeypatch.setattr(server, "get_job_logs", get_job_logs)
    status, _ = follow(server, monkeypatch, tmp_path)
    assert status == "FINISHED:COMPLETED"
    assert server.requests == ["login", "log", "log", "log", "lines"]


def test_lines_are_read_once_the_log_stays_silent_for_a_minute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer(*["RUNNING"] * 40, "FINISHED:COMPLETED", log="", rounds=2)
    _, lines = follow(server, monkeypatch, tmp_path)
    assert server.requests.count("log") == 31
    assert lines[-3:-1] == [LINE.format(1), LINE.format(2)]


def test_committed_lines_grow_in_the_output_once_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also over a lost connection, after which the lines are asked for again."""
    server = FakeServer("RUNNING", "RUNNING", NoConnection, "RUNNING", "FINISHED:COMPLETED", rounds=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rounds.jsonl").write_text('{"round": "of an earlier attempt"}\n')
    follow(server, monkeypatch, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert lines == [build_line(1), build_line(2)]


@pytest.mark.parametrize("failure", [NoConnection, SessionClosed, AuthenticationError])
def test_server_that_comes_back_is_followed_on(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = FakeServer("RUNNING", failure, "RUNNING", "FINISHED:COMPLETED", rounds=1)
    status, lines = follow(server, monkeypatch, tmp_path)
    assert status == "FINISHED:COMPLETED"
    assert lines == [
        LINE.format(1),
        "job J: running",
        "the server at centre:8003 does not reply; trying again for 300 s. Committed rounds are safe at the server",
        "the server at centre:8003 replies again",
        "job J: finished:completed",
    ]


def test_server_that_stays_away_ends_the_command_with_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: SimpleNamespace
) -> None:
    server = FakeServer("RUNNING", NoConnection)
    log_in = server.log_in

    def refuse(*arguments: Any, **options: Any) -> FakeServer:
        if clock.now > 0:
            raise RuntimeError("cannot connect to server")
        return log_in(*arguments, **options)

    monkeypatch.setattr(server, "log_in", refuse)
    error, lines = follow(server, monkeypatch, tmp_path)
    assert isinstance(error, JobFailed)
    assert str(error) == "the server at centre:8003 has not replied for 300 s"
    assert RECONNECT_S <= clock.now < RECONNECT_S + 2 * RETRY_S
    assert len([line for line in lines if "does not reply" in line]) == 1


def test_job_that_died_with_its_server_is_recognised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer("RUNNING", "RUNNING", "RUNNING", started=3.0)
    server.running = False
    error, _ = follow(server, monkeypatch, tmp_path)
    assert "the server was restarted, and job J died with it" in str(error)


def test_job_that_is_about_to_end_is_not_taken_for_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer("RUNNING", "RUNNING", "FINISHED:COMPLETED", started=1.0)
    server.running = False
    assert follow(server, monkeypatch, tmp_path)[0] == "FINISHED:COMPLETED"


@pytest.mark.parametrize(
    ("meta", "started", "running", "lost"),
    [
        ({"status": "RUNNING", "submit_time": 2.0}, 3.0, False, True),
        ({"status": "RUNNING", "submit_time": 2.0}, 1.0, False, False),
        ({"status": "RUNNING", "submit_time": 2.0}, 3.0, True, False),
        ({"status": "SUBMITTED", "submit_time": 2.0}, 3.0, False, False),
        ({"status": "RUNNING"}, 3.0, False, False),
    ],
)
def test_job_is_lost_if_its_server_started_later_and_does_not_run_it(
    meta: dict[str, Any], started: float, running: bool, lost: bool
) -> None:
    server = FakeServer(started=started)
    server.running = running
    assert is_lost(server, {"job_id": "J", **meta}) is lost


IDLE, BUSY = {"status": "no_jobs"}, {"job_id": "J", "status": "started"}


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (None, False),
        ([BUSY], False),
        ([{"job_id": "other", "status": "started"}, BUSY], False),
        ([IDLE], True),
        ([{"job_id": "other", "status": "started"}], True),
        ([{"status": "no_reply"}], False),
        ([{"status": "error"}], False),
        ([], False),
    ],
)
def test_site_is_dropped_if_its_client_reports_that_it_does_not_run_the_job(
    entries: list[dict[str, str]] | None, expected: bool
) -> None:
    server = FakeServer()
    server.clients = {} if entries is None else {"site-2": entries}
    assert is_dropped(server, "site-2", "J") is expected


@pytest.mark.parametrize(("entries", "restarts"), [([BUSY], True), (None, True), ([IDLE], False), ([], True)])
def test_silence_of_a_site_is_explained_once_with_its_remedy(
    entries: list[dict[str, str]] | None, restarts: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = FakeServer("RUNNING", "FINISHED:COMPLETED")
    server.clients = {} if entries is None else {"site-2": entries}
    server.rounds = [build_line(n, timed_out=["site-2", "site-1"] if n == 2 else ["site-2"]) for n in (1, 2, 3)]
    status, lines = follow(server, monkeypatch, tmp_path, restarts=restarts)
    assert status == "FINISHED:COMPLETED"
    (hint,) = (line for line in lines if line.startswith("site-"))
    assert hint.startswith("site-2 did not reply in 2 rounds. If it does not run, start it (KIT/startup/start.sh")
    assert ("the job is submitted again by itself" if restarts else "run this command again") in hint


def test_job_ends_once_a_site_that_was_dropped_is_connected_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = FakeServer("RUNNING", "RUNNING", "RUNNING", "RUNNING")
    silent = [build_line(n, timed_out=["site-2"] * (n < 3), quarantined=["site-2"] * (n == 3)) for n in (1, 2, 3)]
    polls = iter([silent[:1], silent[:2], silent[:2], silent])

    def show_stats(job: str, target: str) -> dict[str, Any]:
        rounds = next(polls)
        # The client's supervisor has restarted it when the third round is committed.
        server.clients = {"site-2": [IDLE]} if len(rounds) == 3 else {}
        return {"server": {STATS: {"record": pack(rounds)}}}

    monkeypatch.setattr(server, "show_stats", show_stats)
    shown: set[int] = set()
    status, lines = follow(server, monkeypatch, tmp_path, restarts=True, shown=shown)
    assert status == DROPPED
    assert shown == {1, 2, 3}
    assert len([line for line in lines if line.startswith("site-2")]) == 1


def test_round_that_was_shown_is_not_shown_again_and_events_precede_their_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = FakeServer("RUNNING", "FINISHED:COMPLETED", rounds=2)
    server.rounds[1]["events"] = [{"round": 2, "site": "server", "event": "stepped_back", "detail": "DETAIL"}]
    _, lines = follow(server, monkeypatch, tmp_path, shown={1})
    assert lines[:2] == ["server: DETAIL", f"{LINE.format(2)}"]


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize(
    ("end", "has_rounds"), [(DROPPED, True), ("FINISHED:FAILED_TO_RUN", True), ("FINISHED:FAILED_TO_RUN", False)]
)
def test_job_is_submitted_again_for_a_dropped_or_slow_site_at_most_three_times(
    times: int, end: str, has_rounds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = FakeServer()
    submitted: list[str] = []
    aborted: list[str] = []
    lines: list[str] = []

    class Follower:
        dropped = ("site-2",)

        def __init__(self, connection: Any, job: str, *_: Any, restarts: bool, shown: set[int], **__: Any):
            self.job, self.restarts, self.shown = job, restarts, shown

        def follow(self) -> str:
            self.shown.add(len(submitted))
            # FLARE may drop a site for good; the last attempt goes on without it.
            fails = len(submitted) <= times and (self.restarts or end != DROPPED)
            return end if fails else "FINISHED:COMPLETED"

    def submit(connection: Any, recipe: Any) -> str:
        submitted.append(f"J{len(submitted) + 1}")
        return submitted[-1]

    monkeypatch.setattr(submission, "JobFollower", Follower)
    monkeypatch.setattr(submission, "_submit", submit)
    monkeypatch.setattr(submission, "_abort", lambda connection, job: aborted.append(job))
    monkeypatch.setattr(submission, "_list_refusals", lambda connection, job: [f"site-2{submission.UNANSWERED}"])
    connection = connect(server, monkeypatch, tmp_path, lines)
    ended = submission._follow(connection, None, tmp_path, None, Printer(lines.append), has_rounds=has_rounds)
    restarts = min(times, submission.MAX_RESTARTS)
    assert submitted == [f"J{number}" for number in range(1, restarts + 2)]
    assert aborted == (submitted[:-1] if end == DROPPED else [])
    assert ended == (submitted[-1], "FINISHED:COMPLETED" if end == DROPPED or times == 1 else end, ended[2])
    assert ended[2].shown == set(range(1, restarts + 2))
    # A folder names the job of its run, and no job of statistics.
    named = [file.read_text() for file in tmp_path.glob(submission.JOB_FILE)]
    assert named == ([f"{submitted[-1]}\n"] if has_rounds else [])
    reason = {
        DROPPED: "connected again, but FLARE has dropped it from the job: job J1 is aborted and submitted again (1 of "
        "at most 3 times); it resumes from its last committed round",
        "FINISHED:FAILED_TO_RUN": "took longer to accept the job than FLARE waits: job J1 is submitted again (1 of at "
        "most 3 times)",
    }
    assert lines[1] == f"site-2: {reason[end]}"
    assert len(lines[1::2]) == restarts


@pytest.mark.parametrize(
    ("status", "running", "started", "is_followed", "job", "aborted"),
    [
        ("RUNNING", True, 1.0, True, "J", False),  # still at the server: follow it
        ("RUNNING", True, 1.0, False, None, True),  # a second process of one job is refused: end the first
        ("RUNNING", False, 3.0, True, None, False),  # died with its server: submit again
        ("RUNNING", False, 3.0, False, None, False),
        ("FINISHED:COMPLETED", False, 1.0, True, "J", False),  # its result was not downloaded yet
        ("FINISHED:COMPLETED", False, 1.0, False, None, False),
        ("FINISHED:EXECUTION_EXCEPTION", False, 1.0, True, "J", False),  # died after its last round: it has a result
        ("FINISHED:ABNORMAL", False, 1.0, True, None, False),
        ("unknown", False, 1.0, True, None, False),  # another server, or the job was deleted
    ],
)
def test_one_command_covers_every_state_of_the_job_before(
    status: str,
    running: bool,
    started: float,
    is_followed: bool,
    job: str | None,
    aborted: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    server = FakeServer("RUNNING", "FINISHED:ABORTED", started=started)
    ended: list[str] = []
    server.running = running

    def get_job_meta(job: str) -> dict[str, Any]:
        if status == "unknown":
            raise JobNotFound(job)
        return {"job_id": job, "status": status, "submit_time": 2.0}

    monkeypatch.setattr(server, "get_job_meta", get_job_meta)

    def download(job: str, folder: str) -> str:
        record = Path(folder) / job / "workspace" / "app_server" / RESULTS
        record.mkdir(parents=True)
        if status != "FINISHED:ABNORMAL":
            (record / "summary.json").touch()
        return str(Path(folder) / job)

    monkeypatch.setattr(server, "download_job_result", download, raising=False)
    monkeypatch.setattr(server, "abort_job", ended.append, raising=False)
    lines: list[str] = []
    connection = connect(server, monkeypatch, tmp_path, lines)
    assert submission._find_job(connection, tmp_path, Printer(lines.append), is_followed=is_followed) is None, (
        "no job yet"
    )
    (tmp_path / submission.JOB_FILE).write_text("J\n")
    assert submission._find_job(connection, tmp_path, Printer(lines.append), is_followed=is_followed) == job
    assert (ended == ["J"]) is aborted


def test_login_that_fails_names_admin_server_and_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = FakeServer()

    def refuse(*_arguments: Any, **_options: Any) -> FakeServer:
        raise NoConnection("cannot connect to server")

    monkeypatch.setattr(server, "log_in", refuse)
    with pytest.raises(ConfigError, match=r"lead cannot log in at centre:8003: .*startup/start\.sh"):
        connect(server, monkeypatch, tmp_path, [])
