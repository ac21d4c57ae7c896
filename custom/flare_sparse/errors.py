"""Exceptions of the package. Each message names the problem, its place, and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FlareSparseError(Exception):
    """Base class of all errors of this package. ``code`` is stable and listed in docs/troubleshooting.md."""

    code = "E_FLARE_SPARSE"


class ConfigError(FlareSparseError):
    """A configuration is invalid. The message names each field, the value given and the values allowed."""

    code = "E_CONFIG"


class DataError(FlareSparseError):
    """A site's data is missing or invalid. The message may name subjects and files, so it stays at the site."""

    code = "E_DATA"


class SelectionError(FlareSparseError, ValueError):
    """A selection is impossible: more entries are requested than exist, or a score is NaN."""

    code = "E_SELECTION"


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


class PolicyRefusal(FlareSparseError):
    """A site's policy forbids an update or a part of the job. Only the code leaves the site."""

    code = "E_POLICY"


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
