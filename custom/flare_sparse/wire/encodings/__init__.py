"""Ways to say a selection, one file each; the codec picks the one that takes the fewest bytes."""

from .bitmap import Bitmap
from .csr import Csr
from .dense import Dense
from .encoding import Encoding
from .shared import Shared
from .shrink import Shrink
from .slices import Slices

ENCODINGS: dict[str, Encoding] = {e.name: e for e in (Dense(), Shared(), Shrink(), Bitmap(), Csr(), Slices())}
CODES: dict[int, Encoding] = {encoding.code: encoding for encoding in ENCODINGS.values()}

__all__ = ["CODES", "ENCODINGS", "Encoding"]
