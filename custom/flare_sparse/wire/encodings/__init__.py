"""Encodings of a selection, one per module.

A name and a code always mean the same section: an encoding whose section changes gets a new name and a new code.
``wire.versions`` lists the encodings of each version of the format.
"""

from .bitmap import Bitmap
from .csr import Csr
from .dense import Dense
from .encoding import Encoding
from .gaps import Gaps
from .shared import Shared
from .shrink import Shrink
from .slices import Slices

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding for encoding in (Dense(), Shared(), Shrink(), Bitmap(), Csr(), Slices(), Gaps())
}
"""Every encoding of the package by name, whichever versions have it."""

__all__ = ["ENCODINGS", "Encoding"]
