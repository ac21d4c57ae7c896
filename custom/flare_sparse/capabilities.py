"""What a site can take part in, as it says itself before it is first asked: its versions, upload caps and rank budget.

The hello that carries it is no message of the wire, since an end of another version must understand it: a flat
dictionary of a few names with strings and numbers, in which the versions are looked at first (docs/wire-format.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import SiteExcluded, abbreviate
from .version import VERSION
from .wire.envelope import VERSION as WIRE_VERSION

V = TypeVar("V", bound="Versions")

MAX_HELLO_FIELDS = 32
"""A hello with more is refused unread; names that this version does not know are not looked at."""


class Versions(BaseModel):
    """What runs at an end. Every version of this package says this much."""

    model_config = ConfigDict(frozen=True, strict=True)

    version: str = Field(pattern=r"^[0-9]{1,4}\.[0-9]{1,4}[0-9A-Za-z.+-]{0,24}$", description="of this package")
    wire: int = Field(ge=0, lt=2**16, description="version of the wire format")

    @property
    def series(self) -> str:
        """``0.1`` of ``0.1.3``: within a series a method does the same at both ends."""
        return ".".join(self.version.split(".")[:2])

    def is_compatible_with(self, other: Versions) -> bool:
        """Whether two ends understand each other."""
        return self.series == other.series and self.wire == other.wire

    def __str__(self) -> str:
        return f"flare-sparse {self.version} (wire format {self.wire})"


class Capabilities(Versions):
    """What a site can take part in; what is left out is not limited."""

    max_upload_bytes: int | None = Field(None, ge=0, lt=2**53, description="largest message that leaves the site")
    max_upload_share: float | None = Field(
        None, gt=0, le=1, allow_inf_nan=False, description="largest share of the model's entries in a message"
    )
    rank: int | None = Field(None, ge=1, le=4096, description="rank budget of adapters")

    def to_message(self) -> dict[str, str | int | float]:
        """The hello of a site that can this."""
        return self.model_dump(exclude_none=True)

    def find_violation(self, entries: int, size: int, total: int) -> str:
        """Why an answer may not leave the site; empty when it may.

        Args:
            entries: that it carries.
            size: its bytes.
            total: entries of the model.
        """
        if self.max_upload_bytes is not None and size > self.max_upload_bytes:
            return f"lets out messages of at most {self.max_upload_bytes:,} bytes, the answer has {size:,} or more"
        if self.max_upload_share is not None and entries > self.max_upload_share * total:
            return (
                f"lets out at most {self.max_upload_share:.1%} of the model in a message, the answer has "
                f"{entries / total:.1%} or more"
            )
        return ""


def local_capabilities(**limits: Any) -> Capabilities:
    """Those of an end that runs this version."""
    return Capabilities(version=VERSION, wire=WIRE_VERSION, **limits)


def parse_hello(said: Any, site: str) -> Capabilities:
    """What a site's hello says, checked; the versions first, since all else may mean something else in another.

    Args:
        said: what came, not believed in any way.
        site: the name the framework knows.

    Raises:
        LeftOut: ``E_VERSION``, the site runs a version that does not fit this one; ``E_HELLO``, this is no hello.
    """
    if not isinstance(said, Mapping) or len(said) > MAX_HELLO_FIELDS:
        raise SiteExcluded("E_HELLO", site, f"its hello is no short list of names and values but {abbreviate(said)}")
    theirs, mine = _read(Versions, said, site), local_capabilities()
    if not mine.is_compatible_with(theirs):
        raise SiteExcluded(
            "E_VERSION",
            site,
            f"it runs {theirs}, the server {mine}: they do not fit together. Install flare-sparse "
            f"{mine.version} there, or {theirs.version} at the server and all other sites",
        )
    return _read(Capabilities, said, site)


def _read(kind: type[V], said: Mapping[Any, Any], site: str) -> V:
    try:
        return kind.model_validate({name: said[name] for name in kind.model_fields if name in said})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        found = abbreviate(said.get(field))
        raise SiteExcluded("E_HELLO", site, f"its hello, {field}: {first['msg']}, found {found}") from error
