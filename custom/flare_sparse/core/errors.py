"""Exceptions of the package. Each message names the problem, its place, and the remedy."""

from __future__ import annotations

import errno
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_NO_MEMORY = (
    os.strerror(errno.ENOMEM),
    "can't allocate memory",
    "failed to map segment",
    "out of memory",
    "MemoryError",
)
"""How the libraries report a lack of memory."""


class FlareSparseError(Exception):
    """Base class of all errors of this package. ``code`` is stable and listed in docs/troubleshooting.md.

    Examples:
        >>> from flare_sparse import Study
        >>> try:
        ...     Study.load("absent.yaml")
        ... except FlareSparseError as error:
        ...     print(error.code)
        E_CONFIG
    """

    code = "E_FLARE_SPARSE"


class ConfigError(FlareSparseError):
    """A configuration is invalid. The message names each field, the value given and the values allowed."""

    code = "E_CONFIG"


class UntrustedCode(ConfigError):
    """A result folder holds, or names, code that a reader of the folder has not allowed to be executed."""

    code = "E_CODE"


class DataError(FlareSparseError):
    """A site's data is missing or invalid. The message may name subjects and files, so it stays at the site."""

    code = "E_DATA"


class MetricsError(FlareSparseError):
    """A task's ``metrics()`` returned something other than finite numbers with the main metric among them."""

    code = "E_METRICS"


class TaskFailed(FlareSparseError):
    """Code of a user task raised an exception of its own. The text may name subjects and files: it stays at the site.

    Args:
        site: name of the site.
        action: what failed, such as ``"Dose.load()"``.
        error: the exception; this one is raised ``from`` it.
        remedy: how to continue; empty if the cause says it.
    """

    code = "E_SITE"

    def __init__(self, site: str, action: str, error: BaseException, remedy: str = ""):
        self.site, self.action, self.error, self.remedy = site, action, error, remedy
        super().__init__(site, action, error, remedy)

    def __str__(self) -> str:
        text = f"site {self.site}: {self.action} failed: {describe_exception(self.error)}"
        return f"{text}\n{self.remedy}" if self.remedy else text


class SelectionError(FlareSparseError, ValueError):
    """A selection is impossible: more entries are requested than exist, or a score is NaN."""

    code = "E_SELECTION"


class UndefinedScores(SelectionError):
    """A score is NaN or infinite, so that its entry has no rank; the values of an update can be the cause."""


class SiteExcluded(FlareSparseError):
    """A site cannot take part in a request; the run continues with the other sites.

    Args:
        code: stable reason code, ``E_...``.
        site: name of the excluded site.
        reason: obstacle to taking part, and the remedy.
    """

    def __init__(self, code: str, site: str, reason: str):
        self.code, self.site, self.reason = code, site, reason
        super().__init__(code, site, reason)

    def __str__(self) -> str:
        return f"{self.code}: site {self.site!r} is excluded: {self.reason}"


class RoundFailed(FlareSparseError):
    """A round received fewer contributions than the quorum; the last committed model is intact."""

    code = "E_QUORUM"


class CheckpointError(FlareSparseError):
    """A checkpoint cannot be written or belongs to another run; the previous checkpoint is intact."""

    code = "E_CHECKPOINT"


class DiskFull(FlareSparseError):
    """A disk is full. The message names the disk, the path and the free bytes."""

    code = "E_DISK"


class OutOfMemory(FlareSparseError):
    """A process got no more memory. The message says what it was doing."""

    code = "E_MEMORY"


class PolicyRefusal(FlareSparseError):
    """A site's policy forbids an update or a part of the job. Only the code leaves the site."""

    code = "E_POLICY"


class RequestRefused(FlareSparseError):
    """A request that the site's own copy of the job does not provide for. Only the code leaves the site."""

    code = "E_REQUEST"


class WireError(FlareSparseError, ValueError):
    """A message contradicts the plan of its receiver.

    Args:
        code: stable reason code, ``E_...`` (listed in docs/wire-format.md).
        field: the part of the message that is wrong.
        expected: the value that the receiver expects.
        found: the value in the message.
        site: name of the sender as FLARE authenticated it, never a name taken from the message.
    """

    def __init__(self, code: str, field: str, expected: object, found: object, site: str = "?"):
        self.code, self.field, self.expected, self.found, self.site = code, field, expected, found, site
        super().__init__(code, field, expected, found, site)

    def __str__(self) -> str:
        return f"{self.code}: site {self.site!r}, {self.field}: expected {self.expected}, found {self.found}"

    def attach_site(self, site: str) -> WireError:
        """Return the same error with the sender's name filled in."""
        return type(self)(self.code, self.field, self.expected, self.found, site)


class RejectedMessage(WireError):
    """The message is malformed or does not belong to this exchange; the round continues without its sender."""


class MissingBase(WireError):
    """The message is a patch over a base that the receiver does not hold; the receiver asks for the full model."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or one of its causes says that a process got no more memory."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MemoryError) or any(text in str(cause) for text in _NO_MEMORY):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def get_failure_code(error: Exception) -> str:
    """Return the code that a site reports when it fails: the error's own, or ``E_SITE`` for any other exception.

    >>> get_failure_code(DataError("sub-01 has no age")), get_failure_code(ValueError("sub-01"))
    ('E_DATA', 'E_SITE')
    """
    return error.code if isinstance(error, FlareSparseError) else "E_SITE"


def format_site_error(error: Exception, code: str | None = None) -> str:
    """Return the report of a failure for the site's own staff: code and message, and the traceback of a foreign error.

    The notes of an error are part of it, such as the traceback of an exception in another process.

    It may name subjects and files, so it must not leave the site.

    Args:
        error: the error.
        code: the code that was reported; None: that of :func:`get_failure_code`.
    """
    is_expected = isinstance(error, FlareSparseError) and not isinstance(error, TaskFailed)
    text = str(error) if isinstance(error, FlareSparseError) else describe_exception(error)
    notes = "".join(f"{note.rstrip()}\n" for note in getattr(error, "__notes__", ()))
    trace = notes if is_expected else "".join(traceback.format_exception(error))
    return f"{code or get_failure_code(error)}: {text}\n{trace}"


def abbreviate(value: object) -> str:
    """Return a short text for an untrusted value.

    Strings are cut to 40 characters. Integers of 2**64 or more and all other objects appear as their type's name, so
    a peer cannot make the receiver format huge numbers or run ``__repr__`` of an object.

    >>> abbreviate("a" * 1000) == repr("a" * 40), abbreviate(10**5000), abbreviate([1])
    (True, 'int', 'list')
    """
    if isinstance(value, str):
        return repr(value[:40])
    is_short = value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)
    return repr(value) if is_short else type(value).__name__


def suggest(name: str, valid: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the closest valid name, or an empty string if none is close.

    >>> suggest("sparsty", ["rounds", "sparsity"])
    " Did you mean 'sparsity'?"
    """
    matches = get_close_matches(str(name), list(valid), n=1)
    return f" Did you mean {matches[0]!r}?" if matches else ""


@contextmanager
def require_extra(user: str, extra: str, kind: type[FlareSparseError] = ConfigError) -> Iterator[None]:
    """Raise an error that names the extra to install, if an import in the block fails.

    Args:
        user: what needs it, such as ``"task.adapter"``.
        extra: the extra of this package.
        kind: class of the error.
    """
    try:
        yield
    except ImportError as error:
        raise kind(f"{user} needs {error.name or 'a package'}: pip install 'flare-sparse[{extra}]'") from error


def format_shape(sizes: Iterable[float]) -> str:
    """Return sizes per axis as text, such as ``52x64x52``."""
    return "x".join(f"{size:g}" for size in sizes)


def list_first(names: Iterable[str], most: int = 12) -> str:
    """Return the first names as text, with the number of the others.

    >>> list_first(["age", "sex", "site"], most=2)
    'age, sex and 1 more'
    """
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def list_first_lines(lines: Sequence[str], most: int) -> list[str]:
    """Return the first lines, and one with the number of the others.

    >>> list_first_lines(["one", "two", "three"], 2)
    ['one', 'two', 'and 1 more']
    """
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def find_user_line(error: BaseException) -> traceback.FrameSummary | None:
    """Return the deepest line of the traceback that lies neither in a library nor in this package; None if none does.

    An error inside pandas, torch or numpy is thus located at the line of the user's module that led there.
    """
    package = str(Path(__file__).parents[1])
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((package, *_LIBRARIES, "<")) and "site-packages" not in frame.filename
    ]
    return frames[-1] if frames else None


def describe_exception(error: BaseException) -> str:
    """Return type, text and the user's line of an exception, such as ``KeyError: 'age' (tasks.py:12 in load: ...)``.

    Without a line of the user's, the deepest line of the traceback is shown.
    """
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    frame = find_user_line(error) or (frames[-1] if frames else None)
    if frame is None:
        return text
    source = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{text}\n  at {frame.filename}:{frame.lineno} in {frame.name}: {source}"
