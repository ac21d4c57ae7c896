"""Capabilities that a site declares in its hello, before its first request: versions, upload caps and rank budget.

The hello is not encoded in the wire format, because an endpoint of another version must be able to read it. It is a
flat mapping of a few names to strings and numbers, and the versions are checked first (docs/wire-format.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.errors import SiteExcluded, abbreviate
from ..core.version import VERSION
from .envelope import VERSION as WIRE_VERSION

V = TypeVar("V", bound="Versions")

MAX_HELLO_FIELDS = 32
"""A hello with more fields is rejected unread. Unknown fields are ignored, so that later versions may add some."""


class Versions(BaseModel):
    """Versions that an endpoint runs. Every version of this package sends these two fields."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: str = Field(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}[0-9A-Za-z.+-]{0,24}$")
    """version of this package"""
    wire: int = Field(ge=0, lt=2**16)
    """version of the wire format"""

    @property
    def series(self) -> str:
        """``0.1`` of ``0.1.3``; within a series a method behaves the same at both ends."""
        return ".".join(self.version.split(".")[:2])

    def is_compatible_with(self, other: Versions) -> bool:
        """Return whether two endpoints can take part in one run: same series, same wire format."""
        return self.series == other.series and self.wire == other.wire

    def __str__(self) -> str:
        return f"flare-sparse {self.version} (wire format {self.wire})"


class Capabilities(Versions):
    """What a site can take part in; a limit that is None does not apply."""

    max_upload_bytes: int | None = Field(None, ge=0, lt=2**53)
    """largest message that leaves the site"""
    max_upload_share: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    """largest share of the model's entries in a message"""
    rank: int | None = Field(None, ge=1, le=4096)
    """rank budget of adapters"""
    initial_model: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    """digest of the initial model that the site has built from the seed"""

    def to_message(self) -> dict[str, str | int | float]:
        """Return the hello that declares these capabilities."""
        return self.model_dump(exclude_none=True)

    def find_violation(self, entries: int, size: int, total: int) -> str:
        """Return the cap that an update would exceed, as text; empty if the site may send it.

        Args:
            entries: number of entries that the update carries.
            size: size of the update in bytes.
            total: number of entries of the model.
        """
        if self.max_upload_bytes is not None and size > self.max_upload_bytes:
            return f"sends messages of at most {self.max_upload_bytes:,} bytes, the update has {size:,} or more"
        if self.max_upload_share is not None and entries > self.max_upload_share * total:
            return (
                f"sends at most {self.max_upload_share:.1%} of the model in a message, the update has "
                f"{entries / total:.1%} or more"
            )
        return ""


def local_capabilities(**limits: Any) -> Capabilities:
    """Return the capabilities of an endpoint that runs this version."""
    return Capabilities(version=VERSION, wire=WIRE_VERSION, **limits)


def parse_hello(hello: Any, site: str) -> Capabilities:
    """Parse and validate a site's hello.

    Args:
        hello: the object received; untrusted.
        site: name of the sender as FLARE authenticated it.

    Raises:
        SiteExcluded: ``E_VERSION`` if the site's version is incompatible with this one; ``E_HELLO`` if the object is
            not a valid hello.
    """
    if not isinstance(hello, Mapping) or len(hello) > MAX_HELLO_FIELDS:
        raise SiteExcluded(
            "E_HELLO",
            site,
            f"its hello must be a mapping of at most {MAX_HELLO_FIELDS} fields, found {abbreviate(hello)}",
        )
    # Versions come first: the other fields may have another meaning in another version.
    site_versions, server_versions = _validate_hello(Versions, hello, site), local_capabilities()
    if not server_versions.is_compatible_with(site_versions):
        raise SiteExcluded(
            "E_VERSION",
            site,
            f"it runs {site_versions}, the server runs {server_versions}: the versions are incompatible. Install "
            f"flare-sparse {server_versions.version} at the site, or {site_versions.version} on the server and at all "
            "other sites",
        )
    return _validate_hello(Capabilities, hello, site)


def _validate_hello(kind: type[V], hello: Mapping[Any, Any], site: str) -> V:
    try:
        return kind.model_validate({name: hello[name] for name in kind.model_fields if name in hello})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        value = abbreviate(hello.get(field))
        raise SiteExcluded("E_HELLO", site, f"its hello, {field}: {first['msg']}, found {value}") from error
