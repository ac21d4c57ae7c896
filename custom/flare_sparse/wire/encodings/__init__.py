"""Encodings of a selection.

A name and a code always mean the same section: an encoding whose section changes gets a new name and a new code.
"""

from .bitmap import Bitmap, Dense, Shared, Shrink
from .encoding import Encoding
from .gaps import Gaps
from .slices import Slices

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding for encoding in (Dense(), Shared(), Shrink(), Bitmap(), Slices(), Gaps())
}
"""Every encoding by name. Of two with the same number of bytes, the encoder uses the one listed first."""

__all__ = ["ENCODINGS", "Encoding"]
