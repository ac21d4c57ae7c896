"""Which encoding says a selection in the fewest bytes, and how few it could be."""

from __future__ import annotations

import math

from ..mask import Mask
from ..params import Layout
from .encodings import ENCODINGS, Encoding


def choose_encoding(on: Mask, known: Mask | None, layout: Layout) -> tuple[Encoding, bytes]:
    """The encoding that says ``on`` in the fewest bytes, and these bytes."""
    for free in (ENCODINGS["dense"], ENCODINGS["shared"]):
        if free.min_bytes(on, known, layout) == 0:
            return free, b""
    bounds = [(e.min_bytes(on, known, layout), e) for e in ENCODINGS.values()]
    best: tuple[Encoding, bytes] | None = None
    for least, encoding in sorted(((b, e) for b, e in bounds if b is not None), key=lambda pair: pair[0]):
        if best is not None and least >= len(best[1]):
            break
        written = encoding.encode(on, known, layout)
        if written is not None and (best is None or len(written) < len(best[1])):
            best = encoding, written
    assert best is not None, "a bitmap says any selection"
    return best


def compute_selection_entropy(on: Mask, known: Mask | None) -> int:
    """Bytes of ``log2 C(n, k)``: k selected of the n that the receiver knows to choose from."""
    if known is not None and on == known:
        return 0
    within = known.count if known is not None and on <= known else on.size
    nats = math.lgamma(within + 1) - math.lgamma(on.count + 1) - math.lgamma(within - on.count + 1)
    return math.ceil(max(nats, 0.0) / math.log(2) / 8 - 1e-9)
