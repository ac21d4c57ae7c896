"""The number formats of values in messages by name: those of the package, and those that a job names besides."""

from importlib.metadata import entry_points

import torch

from ..core.errors import ConfigError, suggest
from ..core.needs import Need
from .number_format import NumberFormat
from .quantized import Quantized
from .values import Compressed, Plain

ValueType = str
"""Name of a number format."""
WITHOUT_BASE = "int8"
"""Format of weights in a message of differences whose receiver holds no vector: fewer bits lose too much of whole
weights, and the next message sends what this one rounds off."""
_FIRST_FOREIGN_CODE = 128

# Formats of few bits round no buffers, and statistics of inputs are one; so they take no exact statistics away.
FORMATS: dict[str, NumberFormat] = {
    "float32": Plain(code=1, dtype=torch.float32, width=4, needs=frozenset()),
    "float16": Plain(code=2, dtype=torch.float16, width=2, rounding=2.0**-10, takes=Need.EXACT_STATISTICS),
    "bfloat16": Plain(code=3, dtype=torch.bfloat16, width=2, rounding=2.0**-7, takes=Need.EXACT_STATISTICS),
    "int8": Quantized(code=5, bits=8, rounding=2.0**-6),
    "int4": Quantized(code=6, bits=4, rounding=2.0**-2),
    "int2": Quantized(code=7, bits=2, rounding=1.0),
    "float32_zstd": Compressed(code=8, dtype=torch.float32),
    "bfloat16_zstd": Compressed(code=9, dtype=torch.bfloat16, rounding=2.0**-7, takes=Need.EXACT_STATISTICS),
    "int1": Quantized(code=10, bits=1, rounding=1.0),
}
"""Every number format. A new one is a row here, and its golden messages."""


def load_format(name: str) -> str:
    """Return the name of a number format, which is then among ``FORMATS``, also if another distribution has it.

    Each end takes the formats that are installed there: no job can bring one.

    Raises:
        ConfigError: there is none, two distributions have one, or it cannot be used.
    """
    if name in FORMATS:
        return name
    found = [entry for entry in entry_points(group="flare_sparse.formats") if entry.name == name]
    if not found:
        raise ConfigError(f"found {name!r}; expected one of {', '.join(FORMATS)}.{suggest(name, list(FORMATS))}")
    owners = [f"{entry.dist.name if entry.dist else 'an unknown distribution'} ({entry.value})" for entry in found]
    if len({entry.value for entry in found}) > 1:
        raise ConfigError(f"{name!r} is the name of {len(found)} number formats, of {' and '.join(owners)}; remove one")
    row = found[0].load()
    if not isinstance(row, NumberFormat):
        raise ConfigError(f"{name!r} of {owners[0]} is {row!r}; expected an instance of a subclass of NumberFormat")
    others = {known.code: other for other, known in FORMATS.items()}
    if not _FIRST_FOREIGN_CODE <= row.code < 2 * _FIRST_FOREIGN_CODE or row.code in others:
        owner = f", the code of {others[row.code]}" if row.code in others else ""
        raise ConfigError(f"{name!r} of {owners[0]} has the code {row.code}{owner}; expected a free one of 128 to 255")
    FORMATS[name] = row
    return name


def uncompress(name: str) -> str:
    """Return the format of the same values without compression."""
    row = FORMATS[name]
    if not isinstance(row, Compressed):
        return name
    return next(other for other, plain in FORMATS.items() if type(plain) is Plain and plain.dtype == row.dtype)
