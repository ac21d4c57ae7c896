"""Subgroups of test subjects: their labels, the names of their metrics, and which of them are too small to report.

A subgroup is a value of one column, such as ``sex=F``. A site sends for each the number of subjects, each metric and
its standard error, as metrics named ``mae in sex=F``, ``error of mae in sex=F`` and ``subjects in sex=F``.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..core.names import clean_name, format_names, parse_numbers

SUBJECTS = "subjects"
"""Metric of a subgroup that counts its subjects."""
ERROR = "error of "
"""Prefix of the name of a metric's standard error."""
MISSING = "missing"
EVERYONE = "all=subjects"
"""The cell of all test subjects, which tells how many are left out."""
RESAMPLES = 200
"""Bootstrap resamples of a standard error: it is then within 10 % of that of many, in 19 of 20 cases."""
_NAME = re.compile(r"(.+?) in ([^=]+=.+)")
_SPECIFICATION = re.compile(r"[^:=]{1,100}(:[0-9]+(\.[0-9]+)?)?")
LONGEST_CELL = 200
"""Most characters of the name of a subgroup, ``column=label``."""
_LONGEST_LABEL = LONGEST_CELL - 100 - 1
# Names of metrics have no markup (tasks/task.py): in its place stand the same signs in full width.
_PLAIN = str.maketrans({sign: chr(ord(sign) + 0xFEE0) for sign in "<>&\"'`\\[]"})


def parse_subgroup(text: str) -> tuple[str, float | None]:
    """Return column and width of the bins of a subgroup setting; None: each value is a subgroup.

    >>> parse_subgroup("age:10"), parse_subgroup("sex")
    (('age', 10.0), ('sex', None))

    Raises:
        ValueError: it is no name of a column, with or without a positive width.
    """
    if not _SPECIFICATION.fullmatch(text):
        raise ValueError(
            f"{text!r}: expected the name of a column, at most 100 characters without : and =, with a width of bins "
            "for numbers, such as age:10"
        )
    column, _, width = text.partition(":")
    if width and float(width) == 0:
        raise ValueError(f"{text!r}: the width of the bins is 0")
    return clean_name(column), float(width) if width else None


def label_values(values: np.ndarray, width: float | None) -> list[str]:
    """Return the subgroup of each value: the value itself, or the bin of this width that holds it.

    >>> label_values(np.array([61.5, np.nan]), 10.0), label_values(np.array(["F", ""]), None)
    (['60 to 70', 'missing'], ['F', 'missing'])

    Raises:
        ValueError: bins are asked for, and the values are text, or the labels of two values would be the same.
    """
    if width is None:
        names = format_names(values)
        label_of = {name: make_plain(name)[:_LONGEST_LABEL] or MISSING for name in set(names)}
        name_of = {label: name for name, label in label_of.items()}
        if alike := [name for name, label in label_of.items() if name_of[label] != name]:
            raise ValueError(
                f"{name_of[label_of[alike[0]]]!r} and {alike[0]!r} would have one label; rename one of them"
            )
        return [label_of[name] for name in names]
    try:
        return [_label_number(value, width) for value in parse_numbers(values).tolist()]
    except ValueError as error:
        raise ValueError(f"{error}; bins need numbers") from error


def name_metric(metric: str, column: str, label: str) -> str:
    """Return the name of a metric of a subgroup.

    >>> name_metric("mae", "sex", "F")
    'mae in sex=F'
    """
    return f"{metric} in {make_plain(column)}={label}"


def split_metric(name: str) -> tuple[str, str] | None:
    """Return metric and subgroup of a metric's name; None where it is over all subjects.

    >>> split_metric("mae in sex=F"), split_metric("mae")
    (('mae', 'sex=F'), None)
    """
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found else None


def suppress_small(metrics: Mapping[str, float], minimum: int) -> dict[str, float]:
    """Return metrics without those of subgroups with fewer subjects, and those from which these could be computed.

    The metrics over all subjects are known, so a single suppressed subgroup would follow from the others. Subgroups of
    its column are left out too, the smallest first, until all that are left out have the minimum together.

    >>> counts = {"sex=F": 30.0, "sex=M": 3.0, "age=20 to 30": 20.0}
    >>> suppress_small({f"subjects in {cell}": count for cell, count in counts.items()}, 10)
    {'subjects in age=20 to 30': 20.0}
    """
    counts: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if (found := split_metric(name)) and found[0] == SUBJECTS:
            counts.setdefault(found[1].partition("=")[0], {})[found[1]] = value
    # The total counts also the subjects whom a smaller minimum left out before.
    total = metrics.get(f"{SUBJECTS} in {EVERYONE}", 0.0)
    shown = {cell for cells in counts.values() for cell in _select_large(cells, minimum, total)}
    return {name: value for name, value in metrics.items() if not (found := split_metric(name)) or found[1] in shown}


def measure_subgroups(
    measure: Callable[[np.ndarray], Mapping[str, float]],
    labels: Mapping[str, Sequence[str]],
    subjects: np.ndarray,
    minimum: int,
) -> dict[str, float]:
    """Return number of subjects, metrics and their standard errors for each subgroup that is large enough.

    Args:
        measure: returns the metrics of the examples at some positions; a position may occur several times.
        labels: subgroup of each example, by column.
        subjects: ``(n,)`` number of each example's subject; the examples of a subject are drawn together.
        minimum: fewest subjects of a subgroup.
    """
    cells = {
        name_metric(SUBJECTS, column, label): np.flatnonzero(np.array(values) == label)
        for column, values in labels.items()
        for label in sorted(set(values))
    }
    counts = {name: float(len(np.unique(subjects[rows]))) for name, rows in cells.items()}
    shown = suppress_small(counts | {f"{SUBJECTS} in {EVERYONE}": float(len(np.unique(subjects)))}, minimum)
    estimates: dict[str, float] = {}
    # Follow the order of the cells, so that the message has the same bytes each time.
    for name, rows in cells.items():
        if name in shown:
            cell = name.removeprefix(f"{SUBJECTS} in ")
            for metric, (value, error) in _estimate(measure, rows, subjects[rows]).items():
                estimates |= {f"{metric} in {cell}": value, f"{ERROR}{metric} in {cell}": error}
    return shown | estimates


def make_plain(name: str) -> str:
    """Return a name for that of a metric: without markup, and without signs that cannot be printed."""
    return "".join(sign if sign.isprintable() else "_" for sign in name.translate(_PLAIN))


def _label_number(value: float, width: float) -> str:
    if not math.isfinite(value):
        return MISSING
    start = math.floor(value / width) * width
    return f"{start:g} to {start + width:g}"


def _select_large(counts: Mapping[str, float], minimum: int, total: float) -> list[str]:
    """Return the cells of a column that are shown; what the others have together is none, or the minimum."""
    shown = sorted((cell for cell in counts if counts[cell] >= minimum), key=lambda cell: (counts[cell], cell))
    everyone = max(total, sum(counts.values()))
    while shown and 0 < everyone - sum(counts[cell] for cell in shown) < minimum:
        shown.pop(0)
    return shown


def _estimate(
    measure: Callable[[np.ndarray], Mapping[str, float]], rows: np.ndarray, subjects: np.ndarray
) -> dict[str, tuple[float, float]]:
    """Return each metric of some examples with its bootstrap standard error over subjects."""
    # Fixed: every environment reports the same bits.
    generator, numbers = np.random.default_rng(0), np.unique(subjects)
    examples = [rows[subjects == number] for number in numbers]
    metrics, drawn = measure(rows), []
    # Of n subjects, n - 1 are drawn, which is unbiased for means (results/runs/bootstrap.py).
    for _ in range(RESAMPLES):
        chosen = generator.integers(len(numbers), size=max(len(numbers) - 1, 1))
        drawn.append(measure(np.concatenate([examples[index] for index in chosen])))
    estimated = {}
    for name, value in metrics.items():
        values = [resample[name] for resample in drawn if math.isfinite(resample.get(name, math.nan))]
        # As in paired comparisons, a metric that few resamples define has no error.
        if math.isfinite(value) and len(values) >= 0.95 * RESAMPLES:
            estimated[name] = (float(value), float(np.std(values)))
    return estimated
