"""What a check has found, in the form that every command prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, Literal, TypeVar

from .errors import ConfigError, FlareSparseError, describe_exception

T = TypeVar("T")
Severity = Literal["PASS", "NOTE", "SKIP", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One finding of ``Study.check()``, ``flare-sparse check``, ``describe`` or a run's start.

    Attributes:
        severity: FAIL: a run would fail, or a site would contribute to no round; WARN: a run ends, but its result may
            be of less use; SKIP: it was not looked at; NOTE: what the data is; PASS: it is as it must be.
        place: what was checked, such as ``data of site-1``.
        text: what was found, with the remedy.
        code: code of the error behind a FAIL; empty for an exception of a user's own code.

    Examples:
        >>> print(Finding("WARN", "data of site-1", "no test examples"))
        WARN data of site-1: no test examples
    """

    severity: Severity
    place: str
    text: str
    code: str = ""

    @classmethod
    def from_error(cls, place: str, error: BaseException) -> Finding:
        """Return the finding of an error: its code and text, or the user's line that raised it."""
        if isinstance(error, FlareSparseError):
            return cls("FAIL", place, str(error), error.code)
        return cls("FAIL", place, describe_exception(error))

    def __str__(self) -> str:
        code = f"{self.code}\n" if self.code else ""
        return f"{self.severity} {self.place}: {code}{self.text}"


@dataclass(frozen=True)
class Attempt(Generic[T]):
    """An action that a check tried.

    Attributes:
        finding: a PASS with the described result, or the FAIL of the action's error.
        result: its result; None if it failed.
    """

    finding: Finding
    result: T | None


def attempt(place: str, action: Callable[[], T], describe: Callable[[T], str] = str) -> Attempt[T]:
    """Try an action, whatever it raises."""
    try:
        result = action()
    # A user's own code may raise anything; the other checks still run.
    except Exception as error:  # noqa: BLE001
        return Attempt(Finding.from_error(place, error), None)
    return Attempt(Finding("PASS", place, describe(result)), result)


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of all sites, equal ones about the same kind of place as one: a column is wrong everywhere.

    >>> found = [Finding("FAIL", f"data of site-{i}", "no column age", "E_DATA") for i in (1, 2)]
    >>> [finding.place for finding in merge_findings(found)]
    ['data of site-1, site-2']
    """
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        kind = finding.place.rpartition(" ")[0]
        groups.setdefault((finding.severity, kind, finding.text, finding.code), []).append(finding)
    return [
        replace(group[0], place=f"{key[1]} {', '.join(finding.place.rpartition(' ')[2] for finding in group)}")
        for key, group in groups.items()
    ]


def get_exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if nothing failed; else that of the first failure: 2 for a wrong configuration, 1 for others."""
    codes = (2 if finding.code == ConfigError.code else 1 for finding in findings if finding.severity == "FAIL")
    return next(codes, 0)
