"""Encodings of a selection: the one that needs the fewest bytes is chosen, beside the fewest possible.

A name and a code always mean the same section: an encoding whose section changes gets a new name and a new code.
"""

import math
from bisect import bisect_right

from ...core.mask import Mask
from ...core.params import Layout
from ..envelope import HEADER_BYTES
from ..number_format import NumberFormat
from .bitmap import Bitmap, Dense, Shared, Shrink
from .encoding import Encoding
from .gaps import Gaps
from .slices import Slices

ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding for encoding in (Dense(), Shared(), Shrink(), Bitmap(), Slices(), Gaps())
}
"""Every encoding by name. Of two with the same number of bytes, the encoder uses the one listed first."""


def choose_encoding(mask: Mask, base_mask: Mask | None, layout: Layout) -> tuple[Encoding, bytes]:
    """Return the encoding that writes ``mask`` in the fewest bytes, and these bytes.

    Args:
        mask: the selection.
        base_mask: the mask that the receiver holds; None: it holds none.
        layout: layout of the model.
    """
    bounds: list[tuple[int, Encoding]] = []
    for encoding in ENCODINGS.values():
        bound = encoding.compute_min_bytes(mask, base_mask, layout)
        if bound == 0:
            return encoding, b""
        if bound is not None:
            bounds.append((bound, encoding))
    best: tuple[Encoding, bytes] | None = None
    # Encoding a selection takes far longer than bounding its length. In ascending order of the bounds, the search can
    # stop at the first bound that the best length so far has reached.
    for bound, encoding in sorted(bounds, key=lambda pair: pair[0]):
        if best is not None and bound >= len(best[1]):
            break
        section = encoding.encode(mask, base_mask, layout)
        # Strict comparison, stable sort: ties go to the same encoding on every host, so retries are bit-identical.
        if section is not None and (best is None or len(section) < len(best[1])):
            best = encoding, section
    assert best is not None, "a bitmap can encode any selection"
    return best


def compute_selection_entropy(mask: Mask, base_mask: Mask | None) -> int:
    """Return ``log2 C(n, k)`` in bytes, rounded up, for k selected entries out of n candidates.

    The candidates are the entries of ``base_mask`` if ``mask`` is nested in it, and all P entries otherwise. A mask
    equal to ``base_mask`` needs 0 bytes.
    """
    if base_mask is not None and mask == base_mask:
        return 0
    candidates = base_mask.count if base_mask is not None and mask <= base_mask else mask.size
    nats = math.lgamma(candidates + 1) - math.lgamma(mask.count + 1) - math.lgamma(candidates - mask.count + 1)
    # lgamma can end up a few ulps below 0 or above a whole number of bytes; neither may change the result.
    return math.ceil(max(nats, 0.0) / math.log(2) / 8 - 1e-9)


def count_entries_within(
    allowed: float, size: int, buffers: int, values: NumberFormat, *, is_selection_held: bool = False
) -> int:
    """Return how many of ``size`` parameters a message of at most ``allowed`` bytes carries; 0: none.

    The parameters are selected at random; all ``buffers`` that travel go beside them. A selection is counted at 1.04
    times its entropy, the bound of the encoding ``gaps``; one that both ends hold costs nothing.
    """

    def compute_bytes(count: int) -> float:
        if is_selection_held or count == size:
            return HEADER_BYTES + values.compute_min_bytes(count) + 4 * buffers
        choices = math.lgamma(size + 1) - math.lgamma(count + 1) - math.lgamma(size - count + 1)
        selection = 16 + 1.04 * choices / math.log(2) / 8
        return HEADER_BYTES + selection + values.compute_min_bytes(count) + 4 * buffers

    if compute_bytes(size) <= allowed:
        return size
    # Above a half, the entropy falls again, and a selection could be longer than that of more entries.
    most = size if is_selection_held else size // 2
    return bisect_right(range(1, most + 1), allowed, key=compute_bytes)
