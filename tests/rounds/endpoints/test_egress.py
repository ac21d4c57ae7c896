"""The egress log: its chain, its order to the message, and its sum."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from egress import assert_logs_equal_ledger
from mortality_job import write_mortality_job
from typer.testing import CliRunner

from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.rounds.endpoints.egress import (
    EGRESS_FOLDER,
    HEAD_FILE,
    LOG_FILE,
    EgressError,
    EgressLog,
    Outgoing,
    read_chain,
)


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """A kit with a log of four messages of two jobs."""
    for job, kind, size in (("age", "train", 3), ("age", "train", 5), ("age", "evaluate", 1), ("dose", "train", 7)):
        EgressLog(tmp_path / EGRESS_FOLDER / "site-1", job, {"metrics": "rounded"}).record(
            Outgoing(kind, ["metrics" if kind == "evaluate" else "weights"], [bytes(size)], run="ab", round=1)
        )
    return tmp_path


def change(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b'"bytes":5', b'"bytes":4'), *lines[2:]]


TAMPERING: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "changed": (change, "line 2 is not the one that was written"),
    "changed at the end": (
        lambda lines: [*lines[:3], lines[3].replace(b"dose", b"age!")],
        "line 4 is not the one that was written",
    ),
    "removed": (lambda lines: [lines[0], *lines[2:]], "line 2 has the number 3"),
    "moved": (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "line 2 has the number 3"),
    "cut off at the end": (lambda lines: lines[:3], "line 4 and all after it were removed: 4 lines were written"),
    "cut inside the last line": (lambda lines: [*lines[:3], lines[3][:-9]], "line 4 and all after it were removed"),
    "all removed": (lambda lines: [], "line 1 and all after it were removed"),
    "no line": (lambda lines: [b"[]\n", *lines[1:]], "line 1 is no line"),
}


@pytest.mark.parametrize("how", TAMPERING)
def test_tampered_log_is_found_and_the_line_named(how: str, kit: Path) -> None:
    tamper, expected = TAMPERING[how]
    file = kit / EGRESS_FOLDER / "site-1" / LOG_FILE
    file.write_bytes(b"".join(tamper(file.read_bytes().splitlines(keepends=True))))
    result = CliRunner().invoke(app, ["site", "log", str(kit)])
    assert result.exit_code == 1
    assert expected in result.output + result.stderr


def test_head_without_its_log_lets_nothing_leave(kit: Path) -> None:
    folder = kit / EGRESS_FOLDER / "site-1"
    (folder / LOG_FILE).unlink()
    with pytest.raises(EgressError, match="all after it were removed: 4 lines"):
        EgressLog(folder, "age").record(Outgoing("train", ["weights"]))


def test_removed_head_lets_nothing_leave(kit: Path) -> None:
    (kit / EGRESS_FOLDER / "site-1" / HEAD_FILE).unlink()
    with pytest.raises(EgressError, match="which holds the number of lines, was removed"):
        EgressLog(kit / EGRESS_FOLDER / "site-1", "age").record(Outgoing("train", ["weights"]))


def test_folder_that_is_no_kit_is_refused(tmp_path: Path) -> None:
    assert "this is no startup kit" in CliRunner().invoke(app, ["site", "log", str(tmp_path)]).stderr


def test_table_sums_messages_and_bytes_by_job_and_kind(kit: Path) -> None:
    result = CliRunner().invoke(app, ["site", "log", str(kit)])
    assert result.exit_code == 0
    head, *table = result.output.splitlines()
    rows = [line.split("│")[1:-1] for line in table if line.startswith("│")]
    last = (kit / EGRESS_FOLDER / "site-1" / LOG_FILE).read_bytes().splitlines()[-1]
    assert (
        head == f"site-1: 4 messages left, with headers 16 bytes; chain intact, head {hashlib.sha256(last).hexdigest()}"
    )
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["age", "train", "weights", "2", "8", "8"],
        ["age", "evaluate", "metrics", "1", "1", "9"],
        ["dose", "train", "weights", "1", "7", "16"],
    ]
    first = json.loads(CliRunner().invoke(app, ["site", "log", str(kit), "--json"]).output)["egress"]["site-1"][0]
    assert (first["policy"], first["run"], first["round"]) == ({"metrics": "rounded"}, "ab", 1)


def test_kinds_that_a_job_of_another_package_names_are_text_in_the_table(tmp_path: Path) -> None:
    EgressLog(tmp_path / EGRESS_FOLDER / "site-1", "age").record(Outgoing("result", ["[/b]\x1b[2J"], [b"1"]))
    result = CliRunner().invoke(app, ["site", "log", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "(/b) (2J" in result.output


KILLED = """
import hashlib, itertools, os, random, signal, sys, time
from pathlib import Path
from flare_sparse.rounds.endpoints.egress import EgressLog, Outgoing

moments = random.Random(1)
for number in range(25):
    if not (child := os.fork()):
        log = EgressLog(Path(sys.argv[1]), "age")
        for message in (f"{number} {count}".encode() for count in itertools.count()):
            log.record(Outgoing("train", ["weights"], [message]))
            os.write(1, hashlib.sha256(message).hexdigest().encode() + b"\\n")
    time.sleep(moments.uniform(0.005, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.long
def test_every_message_of_processes_killed_at_any_time_has_a_line(tmp_path: Path) -> None:
    """A kill between writing and sending leaves a line without a message, never a message without a line."""
    line = [sys.executable, "-c", KILLED, str(tmp_path / "log")]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    sent = done.stdout.split()
    logged = [entry["sha256"] for entry in read_chain(tmp_path / "log")[0]]
    assert sent
    assert set(sent) <= set(logged)
    assert len(set(logged) - set(sent)) <= 25


def test_line_whose_write_was_interrupted_is_cut_before_the_next(kit: Path) -> None:
    folder = kit / EGRESS_FOLDER / "site-1"
    with (folder / LOG_FILE).open("ab") as file:
        file.write(b'{"line":5,"time":"2026-')
    assert len(read_chain(folder)[0]) == 4
    EgressLog(folder, "age").record(Outgoing("train", ["weights"], [b"1"]))
    assert [line["line"] for line in read_chain(folder)[0]] == [1, 2, 3, 4, 5]


def test_head_that_a_crash_left_behind_the_log_counts_as_intact(kit: Path) -> None:
    folder = kit / EGRESS_FOLDER / "site-1"
    old = (folder / HEAD_FILE).read_bytes()
    EgressLog(folder, "age").record(Outgoing("train", ["weights"]))
    (folder / HEAD_FILE).write_bytes(old)
    EgressLog(folder, "age").record(Outgoing("train", ["weights"]))
    assert len(read_chain(folder)[0]) == 6


def test_line_of_any_length_is_cut_and_the_next_message_leaves(tmp_path: Path) -> None:
    log = EgressLog(tmp_path, "job" * 10**6, {"metrics": "x" * 10**6}, "permit" * 10**6, is_durable=False)
    metrics = {f"{'m' * 60}{i}": 0.5 for i in range(20_000)}
    log.record(Outgoing("K" * 3_000_000, ["c" * 10**6] * 10**4, [b"x"], {"metrics": metrics}, sent=b"xy"))
    log.record(Outgoing("train", ["weights"], [b"2"]))
    long, short = read_chain(tmp_path)[0]
    assert len(json.dumps(long)) < 2**17
    assert long["beside"]["omitted characters"] > 10**6
    assert (long["bytes"], long["sent_bytes"], short["line"]) == (1, 2, 2)


def test_disk_without_space_blocks_no_later_message(tmp_path: Path) -> None:
    (tmp_path / HEAD_FILE).touch()
    EgressLog(tmp_path, "age", is_durable=False).record(Outgoing("train", ["weights"], [b"1"]))
    # A limit on the size of files stands for the full disk: the write is cut short, or raises.
    code = """
import resource, signal, sys
from pathlib import Path
from flare_sparse.rounds.endpoints.egress import EgressError, EgressLog, LOG_FILE, Outgoing
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, ((folder / LOG_FILE).stat().st_size + 50, resource.RLIM_INFINITY))
try: EgressLog(folder, "age").record(Outgoing("train", ["weights"], [b"2"]))
except EgressError as error: print(error.code)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "E_EGRESS\n"
    EgressLog(tmp_path, "age", is_durable=False).record(Outgoing("train", ["weights"], [b"3"]))
    assert [line["line"] for line in read_chain(tmp_path)[0]] == [1, 2]


def test_log_without_a_line_is_not_rotated(tmp_path: Path) -> None:
    assert EgressLog(tmp_path, "age").rotate() is None
    assert read_chain(tmp_path)[0] == []


def test_rotated_log_is_one_chain_with_and_without_its_older_files(kit: Path, tmp_path: Path) -> None:
    folder = kit / EGRESS_FOLDER / "site-1"
    with (folder / LOG_FILE).open("ab") as file:
        file.write(b'{"line":5,"ti')
    result = CliRunner().invoke(app, ["site", "log", str(kit), "--rotate"])
    assert result.exit_code == 0, result.output
    EgressLog(folder, "age").record(Outgoing("train", ["weights"], [b"1"]))
    old = EgressLog(folder, "age").rotate()
    assert old is not None
    assert old.name == "egress-000000000006.jsonl"
    EgressLog(folder, "age").record(Outgoing("train", ["weights"], [b"1"]))
    assert [line["line"] for line in read_chain(folder)[0]] == list(range(1, 9))
    assert "6 messages" in CliRunner().invoke(app, ["site", "log", str(kit)]).output
    first = folder / "egress-000000000004.jsonl"
    whole = first.read_bytes()
    first.write_bytes(whole.replace(b"weights", b"scores!"))
    with pytest.raises(EgressError, match="is not the one that was written"):
        read_chain(folder)[0]
    first.unlink()
    assert [line["line"] for line in read_chain(folder)[0]] == [5, 6, 7, 8]
    old.unlink()
    assert [line["line"] for line in read_chain(folder)[0]] == [7, 8]
    (folder / LOG_FILE).unlink()
    with pytest.raises(EgressError, match="all after it were removed"):
        EgressLog(folder, "age").record(Outgoing("train", ["weights"]))


def test_concurrent_jobs_share_one_chain(tmp_path: Path) -> None:
    def write(job: str) -> None:
        log = EgressLog(tmp_path, job, is_durable=False)
        for number in range(20):
            if number == 10:
                log.rotate()
            log.record(Outgoing("train", ["weights"], [np.zeros(8, np.uint8)]))

    threads = [threading.Thread(target=write, args=(job,)) for job in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [line["kind"] for line in read_chain(tmp_path)[0]].count("train") == 60


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["plain", "masked"])
def test_log_of_a_local_run_has_the_bytes_of_the_ledger(aggregation: str, tmp_path: Path) -> None:
    config = write_mortality_job(tmp_path, "log", 2, wire={"aggregation": aggregation})
    run_in_process(Study.load(config), RunFolder(tmp_path / "out"))
    assert_logs_equal_ledger(tmp_path / "out")
