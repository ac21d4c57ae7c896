"""Encodings of a selection.

A name and a code always mean the same section: an encoding whose section changes gets a new name and a new code.
"""

from ...core.errors import RejectedMessage
from .bitmap import Bitmap, Shrink
from .empty import Dense, Shared
from .encoding import Encoding
from .gaps import Gaps
from .slices import Slices

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding for encoding in (Dense(), Shared(), Shrink(), Bitmap(), Slices(), Gaps())
}
"""Every encoding by name. Of two with the same number of bytes, the encoder uses the one listed first."""

_BY_CODE = {encoding.code: encoding for encoding in ENCODINGS.values()}


def find_encoding(code: int, field: str) -> Encoding:
    """Return the encoding that has ``code`` in a header's ``field``.

    Raises:
        RejectedMessage: there is none.
    """
    if code not in _BY_CODE:
        raise RejectedMessage("E_VERSION", field, sorted(_BY_CODE), code)
    return _BY_CODE[code]


__all__ = ["ENCODINGS", "Encoding", "find_encoding"]
