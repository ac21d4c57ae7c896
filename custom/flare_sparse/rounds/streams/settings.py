"""Settings of a sparse exchange, and the entries that they select."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor

from ...core.errors import ConfigError, suggest
from ...core.mask import Mask, floor_fraction, top_k
from ...core.params import Layout
from ...wire.formats import FORMATS, ValueType


@dataclass(frozen=True)
class StreamSettings:
    """What a sender sends.

    Attributes:
        keep: share of the entries in a message, in (0, 1]; running statistics travel whole.
        values: number format.
        error_feedback: whether a site adds what it did not send to its next update.
        mask: patterns of names, as in a shell; only arrays that match one travel. None: all arrays.

    Raises:
        ConfigError: a setting is invalid.
    """

    keep: float = 1.0
    values: ValueType = "float32"
    error_feedback: bool = True
    mask: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, (int, float)) or not 0 < self.keep <= 1:
            raise ConfigError(f"keep: expected a number above 0 and at most 1, found {self.keep!r}")
        if self.values not in FORMATS:
            hint = suggest(str(self.values), list(FORMATS))
            raise ConfigError(f"values: expected one of {', '.join(FORMATS)}, found {self.values!r}.{hint}")
        # A text such as "no" counts as true.
        if not isinstance(self.error_feedback, bool):
            raise ConfigError(f"error_feedback: expected true or false, found {self.error_feedback!r}")
        if self.mask is not None and not (self.mask and all(isinstance(pattern, str) for pattern in self.mask)):
            raise ConfigError(f"mask: expected patterns of array names, such as 'head.*', found {self.mask!r}")

    @property
    def is_exact(self) -> bool:
        """Whether messages carry all values without loss."""
        return self.keep == 1 and self.mask is None and self.values in ("float32", "float32_zstd")


def find_candidates(layout: Layout, settings: StreamSettings, missing: Collection[str] = ()) -> Mask:
    """Return the entries that may travel: of arrays that the mask names and that are not ``missing``.

    Raises:
        ConfigError: the mask names no array.
    """
    patterns = settings.mask
    if patterns is None:
        return Mask.from_tensors(layout, lambda spec: spec.name not in missing) if missing else Mask.full(layout.size)
    named = {spec.name for spec in layout.tensors if any(fnmatchcase(spec.name, pattern) for pattern in patterns)}
    if not named:
        names = ", ".join(spec.name for spec in layout.tensors[:5])
        raise ConfigError(f"mask: no array matches {list(patterns)}; the arrays are {names}, ...")
    return Mask.from_tensors(layout, lambda spec: spec.name in named and spec.name not in missing)


def select_entries(delta: Tensor, candidates: Mask, layout: Layout, keep: float) -> Mask:
    """Return the ``keep`` largest share of the candidates, at least one, and all running statistics among them.

    Args:
        delta: float32 ``(P,)``.
        candidates: entries that may travel.
        layout: layout of the vector.
        keep: share of the candidates.

    Raises:
        UndefinedScores: a candidate is NaN.
    """
    if keep == 1:
        return candidates
    # A running variance that is the sum of deltas of different rounds could become negative.
    whole = find_buffers(layout) & candidates
    pool = candidates - whole
    return whole | top_k(delta.abs(), min(max(floor_fraction(keep, pool.count), 1), pool.count), pool)


def find_buffers(layout: Layout) -> Mask:
    """Return the entries of running statistics."""
    return Mask.from_tensors(layout, lambda spec: spec.role == "buffer")
