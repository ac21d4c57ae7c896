"""A site's egress log: one line for each message that leaves, written to disk before the message is sent.

Every line holds the digest of the line before it, and a file beside the log holds the number and the digest of the last
line. So a line that was changed, removed or moved shows, and so does a log whose end was cut off. A rotated log
goes on in a new file, whose first line continues the chain of the old one.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...core.checkpoint.writing import sync_to_disk, write_new_file
from ...core.errors import FlareSparseError, WireError
from ...core.exchange import Update
from ...wire.codec import read_summary
from ...wire.steps import Step, unpack_message

EGRESS_FOLDER = "flare_sparse_egress"
"""Folder in a site's startup kit with its egress log, by name of the site."""
LOG_FILE, HEAD_FILE = "egress.jsonl", "head.txt"
_START = "0" * 64
ROTATION = "rotation"
"""Kind of the first line of a log that goes on from an older file."""
_LONGEST_LINE, _LONGEST_TEXT = 2**15, 200
# More than the longest line: what a job names may be of any length, its line is not.
_TAIL_BYTES = 2**20
_STEP_CONTENTS = {
    Step.KEYS: "keys",
    Step.SHARES: "shares of keys",
    Step.VALUES: "padded values",
    Step.REVEAL: "shares of keys",
}


class EgressError(FlareSparseError):
    """The egress log cannot be written, or was changed; nothing leaves the site. Only the code leaves."""

    code = "E_EGRESS"


@dataclass(frozen=True)
class Outgoing:
    """One message that is about to leave.

    Attributes:
        kind: kind of the request that it answers, ``hello``, ``collection``, ``refusal`` or ``result``.
        contents: what it contains.
        parts: its bytes.
        beside: the numbers that travel beside it in the clear.
        run, round: of the request; empty and 0 without one.
        sent: all that leaves with it, as it is serialized: keys, headers and what FLARE adds of this site; None: the
            parts alone.
    """

    kind: str
    contents: Sequence[str]
    parts: Sequence[np.ndarray | bytes] = ()
    beside: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    round: int = 0
    sent: bytes | None = None


def describe_message(message: np.ndarray, beside: Mapping[str, Any] | None = None) -> Outgoing:
    """Return what an encoded update or a reply in a sum contains, read from its header."""
    beside = beside or {}
    extra = [name for name in beside if beside[name] not in ({}, None)]
    try:
        header, content = read_summary(message)
        contents = [content, *(name for name in extra if name != content)]
        return Outgoing(header.kind, contents, [message], beside, header.run.hex(), header.round)
    except WireError:
        pass
    try:
        step, sum_id, _ = unpack_message(message, "site")
        return Outgoing(sum_id.kind, [_STEP_CONTENTS[step], *extra], [message], beside, sum_id.run, sum_id.round)
    except WireError:
        return Outgoing("result", ["unknown bytes", *extra], [message], beside)


def build_beside(update: Update, events: Any) -> dict[str, Any]:
    """Return what travels beside the message of an update, in the clear."""
    return {"examples": update.num_examples, "metrics": dict(update.metrics), **({"events": events} if events else {})}


class EgressLog:
    """Appends to the egress log of a site; the jobs of a site, in processes of their own, share it.

    Args:
        folder: folder of the site's log.
        job: name of the job.
        terms: terms of the policy in force, as far as they are not the defaults.
        permit: the job's permit; None: it names none.
        is_durable: whether a line is on disk when :meth:`record` returns. Not in a simulation in one process, from
            which nothing leaves.
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        terms: Mapping[str, Any] | None = None,
        permit: str | None = None,
        *,
        is_durable: bool = True,
    ):
        self.folder, self.job, self.terms, self.permit = folder, job, dict(terms or {}), permit
        self.is_durable = is_durable

    def record(self, outgoing: Outgoing) -> None:
        """Append the line of a message; the message may be sent once this returns.

        Raises:
            EgressError: the line cannot be written, or the log was changed since the last one; nothing may be sent.
        """
        size, digest = _measure(outgoing.parts)
        sent_size, sent_digest = (size, digest) if outgoing.sent is None else _measure([outgoing.sent])
        entry = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "job": self.job,
            "run": outgoing.run,
            "kind": outgoing.kind,
            "round": outgoing.round,
            "contents": list(outgoing.contents),
            "bytes": size,
            "sha256": digest,
            "sent_bytes": sent_size,
            "sent_sha256": sent_digest,
            "beside": dict(outgoing.beside),
            "policy": self.terms,
            "permit": self.permit,
        }
        try:
            with self._open() as log:
                self._append(log, _shorten(entry))
        except OSError as error:
            raise EgressError(
                f"{self.folder / LOG_FILE}: the egress log cannot be written: {error.strerror}; nothing leaves until "
                "the disk has space and the user that runs the site may write there"
            ) from error

    def rotate(self) -> Path | None:
        """Keep the log under the name of its last line, begin a new file that continues its chain, and return the old
        one, which may be moved elsewhere; None: nothing was logged yet.

        Raises:
            EgressError: the log was changed.
            OSError: a file cannot be written; the log is as it was.
        """
        with self._open() as log:
            entries, head = read_chain(self.folder)
            if not entries:
                return None
            last = entries[-1]["line"]
            file, old = self.folder / LOG_FILE, self.folder / f"egress-{last:012d}.jsonl"
            # A piece of a line at the end was never sent, and would stand between two files of the chain.
            os.ftruncate(log, file.read_bytes().rfind(b"\n") + 1)
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps(
                {"line": last + 1, "time": time, "job": "", "run": "", "kind": ROTATION, "round": 0, "contents": [],
                 "bytes": 0, "sent_bytes": 0, "continues": old.name, "previous": head},
                separators=(",", ":"),
            ).encode()  # fmt: skip
            part = file.with_suffix(".part")
            part.unlink(missing_ok=True)
            write_new_file(part, line + b"\n")
            # The name of the log is never without a file: a crash leaves the old log or the new one.
            old.unlink(missing_ok=True)
            os.link(file, old)
            part.replace(file)
            sync_to_disk(self.folder)
            self._write_head(last + 1, _compute_digest(line))
            return old

    @contextmanager
    def _open(self) -> Iterator[int]:
        """Yield the descriptor of the log; other jobs of the site wait meanwhile."""
        file = self.folder / LOG_FILE
        is_new = not file.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            log = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                fcntl.flock(log, fcntl.LOCK_EX)
                # Whoever waited while the log was rotated holds the old file.
                if file.stat().st_ino != os.fstat(log).st_ino:
                    continue
                yield log
                if is_new and self.is_durable:
                    sync_to_disk(self.folder)
                return
            finally:
                os.close(log)

    def _append(self, log: int, entry: dict[str, Any]) -> None:
        size = os.fstat(log).st_size
        start = max(0, size - _TAIL_BYTES)
        tail = os.pread(log, size - start, start)
        # A loss of power in the middle of a write leaves a piece of a line, whose message was never sent.
        whole, newline, _ = tail.rpartition(b"\n")
        if len(whole) + len(newline) < len(tail):
            size = start + len(whole) + len(newline)
            os.ftruncate(log, size)
        last = whole.rpartition(b"\n")[2]
        number, previous = (_read_number(last, self.folder), _compute_digest(last)) if newline else (0, _START)
        if number:
            _check_head(self.folder, number, lambda count: previous if count == number else "")
        # A disk without space may leave an empty head before the first line.
        elif not (self.folder / HEAD_FILE).exists() or not (self.folder / HEAD_FILE).stat().st_size:
            self._write_head(0, _START)
        else:
            _check_head(self.folder, 0, lambda count: _START)
        line = json.dumps({"line": number + 1, **entry, "previous": previous}, separators=(",", ":")).encode()
        if os.write(log, line + b"\n") != len(line) + 1:
            os.ftruncate(log, size)
            raise OSError(28, "no space left on device")
        if self.is_durable:
            os.fsync(log)
        self._write_head(number + 1, _compute_digest(line))

    def _write_head(self, number: int, digest: str) -> None:
        # Not flushed: after a loss of power it may be behind the log, which counts as intact.
        head = os.open(self.folder / HEAD_FILE, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            os.pwrite(head, f"{number:016d} {digest}\n".encode(), 0)
        finally:
            os.close(head)


def find_logs(folder: Path) -> dict[str, Path]:
    """Return the folder of each site's log, by site, in a startup kit or in the result folder of a simulated run."""
    found: dict[str, Path] = {}
    for place in ("", "workspace/*/", "workspace/*/*/"):
        found |= {path.name: path for path in folder.glob(f"{place}{EGRESS_FOLDER}/*") if path.is_dir()}
    return dict(sorted(found.items()))


def read_chain(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the lines of a site's log, whose chain was checked, and its head: the digest of the last line.

    A piece of a line at the end, without its end, is left out: its message was never sent.

    Of a rotated log, the older files that are still in the folder come first.

    Raises:
        EgressError: a line was changed, removed or moved, or the end was cut off; the error names the line.
    """
    files = [file for file in (*sorted(folder.glob("egress-*.jsonl")), folder / LOG_FILE) if file.exists()]
    try:
        raw_lines = [line for file in files for line in file.read_bytes().split(b"\n")[:-1]]
    except OSError as error:
        raise _describe_damage(folder, f"it cannot be read: {error}") from error
    start, first = 0, _START
    with suppress(ValueError, KeyError, TypeError, IndexError, RecursionError):
        # Older files may have been moved elsewhere.
        opening = json.loads(raw_lines[0])
        if opening["kind"] == ROTATION:
            start, first = int(opening["line"]) - 1, str(opening["previous"])
    digests, entries = [first], []
    for number, raw in enumerate(raw_lines, start + 1):
        found = _read_number(raw, folder, number)
        if found != number:
            raise _describe_damage(folder, f"line {number} has the number {found}: a line was removed, added or moved")
        entries.append(json.loads(raw))
        if entries[-1].get("previous") != digests[-1]:
            changed = number - 1 or number
            raise _describe_damage(
                folder, f"line {changed} is not the one that was written: it was changed or replaced"
            )
        digests.append(_compute_digest(raw))
    _check_head(folder, start + len(raw_lines), lambda count: digests[count - start] if count >= start else "")
    return entries, digests[-1]


def sum_lines(lines: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return the number of messages and of bytes by job, kind and contents, in the order of their first message."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for line in (line for line in lines if line["kind"] != ROTATION):
        key = line["job"], line["kind"], ", ".join(line["contents"])
        messages, size = sums.get(key, (0, 0))
        sums[key] = messages + 1, size + line["bytes"]
    return sums


def _check_head(folder: Path, lines: int, get_digest: Callable[[int], str]) -> None:
    """Compare a log with the head beside it, which may be behind, but not ahead.

    Args:
        folder: folder of the log.
        lines: number of its lines.
        get_digest: returns the digest of a line by its number, 0 for the start; empty: it is not at hand.

    Raises:
        EgressError: the log is shorter than the head says, or its last line is another one.
    """
    try:
        count, digest = (folder / HEAD_FILE).read_text().split()
        recorded = int(count)
    except FileNotFoundError:
        if lines:
            raise _describe_damage(folder, f"{HEAD_FILE}, which holds the number of lines, was removed") from None
        return
    except (OSError, ValueError):
        raise _describe_damage(folder, f"{HEAD_FILE} was changed") from None
    if recorded > lines:
        raise _describe_damage(folder, f"line {lines + 1} and all after it were removed: {recorded} lines were written")
    if get_digest(recorded) not in (digest, ""):
        raise _describe_damage(folder, f"line {recorded} is not the one that was written: it was changed or replaced")


def _read_number(raw: bytes, folder: Path, place: int | None = None) -> int:
    """Return the number that a line states of itself.

    Raises:
        EgressError: it is no line of a log.
    """
    number = None
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        number = json.loads(raw)["line"]
    # Refuse true, too, which is an int to isinstance; an assertion would not run in optimised code.
    if type(number) is not int:
        raise _describe_damage(folder, f"line {place or 'at the end'} is no line of this log: it was changed")
    return number


def _measure(parts: Sequence[np.ndarray | bytes]) -> tuple[int, str]:
    """Return the number of bytes of some parts, and their digest."""
    digest, size = hashlib.sha256(), 0
    for part in parts:
        content = np.ascontiguousarray(part).data if isinstance(part, np.ndarray) else part
        digest.update(content)
        size += len(content) if isinstance(content, bytes) else content.nbytes
    return size, digest.hexdigest()


def _shorten(entry: dict[str, Any]) -> dict[str, Any]:
    """Return a line's content with what a job names cut to a length that can be read back; its digest tells the rest.

    A line of any length would block every later message of the site.
    """
    contents = [str(text)[:_LONGEST_TEXT] for text in entry["contents"][:_LONGEST_TEXT]]
    texts = {name: str(entry[name])[:_LONGEST_TEXT] for name in ("job", "run", "kind")}
    permit = None if entry["permit"] is None else str(entry["permit"])[:_LONGEST_TEXT]
    entry = {**entry, **texts, "contents": contents, "permit": permit}
    for name in ("beside", "policy"):
        text = json.dumps(entry[name], default=str, sort_keys=True)
        if len(text) > _LONGEST_LINE // 2:
            entry[name] = {"omitted characters": len(text), "sha256": _compute_digest(text.encode())}
    return entry


def _compute_digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _describe_damage(folder: Path, reason: str) -> EgressError:
    return EgressError(
        f"{folder / LOG_FILE}: {reason}. Keep the folder as it is for an examination; to let messages leave "
        "again, move it elsewhere: the site begins a new log"
    )
