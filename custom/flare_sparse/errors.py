"""Every error that a user, a site or the server can meet: what was wrong, where, and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FlareSparseError(Exception):
    """Base of all errors of this package. ``code`` is stable and listed in docs/troubleshooting.md."""

    code = "E_FLARE_SPARSE"


class ConfigError(FlareSparseError):
    """A configuration is not usable. The message names each field, what was given and what is allowed."""

    code = "E_CONFIG"


class DataError(FlareSparseError):
    """A site's data is not usable. The message may name subjects and files: it stays at the site."""

    code = "E_DATA"


class SelectionError(FlareSparseError, ValueError):
    """A selection cannot be made: more entries wanted than there are, or scores that are not numbers."""

    code = "E_SELECTION"


class SiteExcluded(FlareSparseError):
    """A site is not asked, since it cannot take part; the others go on without it.

    Args:
        code: stable reason, ``E_...``.
        site: who is left out.
        why: what does not fit, and the way out.
    """

    def __init__(self, code: str, site: str, why: str):
        self.code, self.site, self.why = code, site, why
        super().__init__(code, site, why)

    def __str__(self) -> str:
        return f"{self.code}: site {self.site!r} is left out: {self.why}"


class RoundFailed(FlareSparseError):
    """A round found too few usable contributions; the model is what it was before the round."""

    code = "E_QUORUM"


class CheckpointError(FlareSparseError):
    """A checkpoint cannot be written, or is not of this run; the one before it is intact."""

    code = "E_CHECKPOINT"


class PolicyRefusal(FlareSparseError):
    """A site's policy does not let this out. Only the code leaves the site."""

    code = "E_POLICY"


class WireError(FlareSparseError, ValueError):
    """A message that does not fit what its receiver holds.

    Args:
        code: stable reason, ``E_...`` (docs/wire-format.md lists them).
        field: the part of the message that is wrong.
        expected: what the receiver holds.
        found: what came.
        site: who sent it (the name the framework knows, never one from the message).
    """

    def __init__(self, code: str, field: str, expected: object, found: object, site: str = "?"):
        self.code, self.field, self.expected, self.found, self.site = code, field, expected, found, site
        super().__init__(code, field, expected, found, site)

    def __str__(self) -> str:
        return f"{self.code}: site {self.site!r}, {self.field}: expected {self.expected}, found {self.found}"

    def with_site(self, site: str) -> WireError:
        """The same error with the sender's name filled in."""
        return type(self)(self.code, self.field, self.expected, self.found, site)


class RejectedMessage(WireError):
    """The message is malformed or does not belong here; its sender is left out of the round."""


class MissingBase(WireError):
    """The message leans on something that the receiver does not hold: it answers "send everything"."""


def abbreviate(value: object) -> str:
    """A few characters of anything that came from outside: a huge number's digits or an object's own text, which may be as
    long as a peer likes, are never asked for.

    >>> abbreviate("a" * 1000) == repr("a" * 40), abbreviate(10**5000), abbreviate([1])
    (True, 'int', 'list')
    """
    if isinstance(value, str):
        return repr(value[:40])
    short = value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)
    return repr(value) if short else type(value).__name__


def suggest(name: str, valid: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest valid name, or nothing when none is near.

    >>> suggest("sparsty", ["rounds", "sparsity"])
    " Did you mean 'sparsity'?"
    """
    near = get_close_matches(str(name), list(valid), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
