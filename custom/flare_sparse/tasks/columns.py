"""Columns of a site's data as numbers, and statistics of them of which each is computed from enough rows."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveInt, RootModel

from ..cohorts.subgroups import MISSING, SUBJECTS, label_values, name_metric, suppress_small
from ..core.names import format_names, parse_numbers
from .task import ORIENTATION, Column, SiteData, Task

LEAST = 5
"""Fewest rows that a job may ask for: a site computes no figure from fewer, whatever its policy."""
QUANTILES = (5, 25, 50, 75, 95)
"""Quantiles of a description, in percent."""
BINS = 15
"""Cells of a histogram before those of too few rows are merged."""
_MOST_LABELS = 20
"""Text columns with more labels, such as identifiers, describe nothing."""
Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class Figures(BaseModel):
    """Statistics of a column, each from enough rows; what a receiver checks.

    Attributes:
        count: number of rows with a value.
        mean, stddev: mean and standard deviation.
        quantile: quantiles by percent, where enough rows lie on both sides.
        histogram: lower bound, upper bound and rows of each cell.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    count: PositiveInt
    mean: FiniteFloat
    stddev: Annotated[FiniteFloat, Field(ge=0)]
    quantile: dict[Annotated[str, Field(pattern="^[0-9]{1,2}$")], FiniteFloat]
    histogram: Annotated[tuple[tuple[FiniteFloat, FiniteFloat, PositiveInt], ...], Field(max_length=BINS)]


class Description(RootModel[Annotated[dict[Name, Figures], Field(max_length=10_000)]]):
    """Figures by column, as a site sends them."""


def list_columns(task: Task, data: SiteData) -> list[Column]:
    """Return the columns of a site's data: those that the task describes, or all that it can partition by.

    Raises:
        ConfigError: the task knows no columns.
        DataError: the data cannot be read.
    """
    described = [_label_marks(column) for column in task.describe_columns(data) if column.kind != "subject"]
    if any(column.kind != ORIENTATION for column in described):
        return described
    cohort = task.cohort(data.path)
    own = set(task.select(data, cohort))
    rows = [row for row, name in enumerate(cohort.ids) if name in own]
    columns = (_read_column(name, np.asarray(values)[rows]) for name, values in cohort.columns.items())
    return [*described, *(column for column in columns if column is not None)]


def encode_columns(
    columns: Sequence[Column], least: int, bound: Callable[[str, int], int] = lambda name, rows: rows
) -> dict[str, np.ndarray]:
    """Return the values of each number, and 0 or 1 by row for each label, without those of fewer than ``least`` rows.

    Labels, a missing value among them, are named ``sex=F``. A rare label takes others of its column with it, until the
    rows that are left out are enough, too (:func:`flare_sparse.cohorts.subgroups.suppress_small`).

    Args:
        columns: the columns.
        least: fewest rows.
        bound: returns the number of rows that decides, at most the exact one, by the name of a column or label.
    """
    encoded: dict[str, np.ndarray] = {}
    for column in columns:
        present = bound(column.name, len(column.numbers))
        if present >= least:
            encoded[column.name] = column.numbers
        labels = dict(column.labels) | ({MISSING: column.missing} if column.missing else {})
        # Beside missing values, the present numbers are the other group.
        groups = {label: bound(f"{column.name}={label}", count) for label, count in labels.items()}
        groups |= {"present": present} if len(column.numbers) else {}
        kept = suppress_small({name_metric(SUBJECTS, "column", label): n for label, n in groups.items()}, least)
        for label, count in labels.items():
            if name_metric(SUBJECTS, "column", label) in kept:
                encoded[f"{column.name}={label}"] = (np.arange(column.rows) < count).astype(float)
    return encoded


def count_cells(values: np.ndarray, edges: np.ndarray, least: int) -> list[tuple[float, float, int]]:
    """Return lower bound, upper bound and rows of the cells of a histogram, merged until each has enough rows.

    The outer cells also hold the rows beyond them.

    Args:
        values: ``(n,)``, at least ``least``.
        edges: ``(cells + 1,)``, ascending.
        least: fewest rows of a cell.

    >>> count_cells(np.array([0.5] * 12 + [1.5, 2.5] * 6 + [3.5]), np.arange(5.0), 10)
    [(0.0, 1.0, 12), (1.0, 4.0, 13)]
    """
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    cells: list[tuple[float, float, int]] = []
    low, rows = float(edges[0]), 0
    for high, count in zip(edges[1:].tolist(), counts.tolist(), strict=True):
        rows += count
        if rows >= least:
            cells.append((low, high, rows))
            low, rows = high, 0
    # The last cells have too few rows by themselves.
    low, _, last = cells.pop()
    return [*cells, (low, float(edges[-1]), last + rows)]


def compute_quantile(values: np.ndarray, share: float, least: int) -> float | None:
    """Return a quantile as the mean of the ``least`` values that are nearest to it in rank.

    No value of a single row is returned. None: fewer than half as many lie on one side, as for outer quantiles of few
    values.

    >>> compute_quantile(np.arange(101.0), 0.5, 10), compute_quantile(np.arange(101.0), 0.01, 10)
    (50.5, None)
    """
    start = round(share * (len(values) - 1) - (least - 1) / 2)
    if start < 0 or start + least > len(values):
        return None
    return float(np.sort(values)[start : start + least].mean())


def compute_figures(values: np.ndarray, least: int) -> Figures:
    """Return the figures of a column ``(n,)``, none of which is computed from fewer than ``least`` rows.

    The cells of the histogram lie in the site's own range: no edge comes from elsewhere.
    """
    ordered = np.sort(values)
    # Means of several rows, so that neither end is the value of a single one.
    low, high = float(ordered[:least].mean()), float(ordered[-least:].mean())
    # A constant column has a range of no width.
    edges = np.linspace(low, max(high, float(np.nextafter(low, np.inf))), BINS + 1)
    found = {str(percent): compute_quantile(values, percent / 100, least) for percent in QUANTILES}
    return Figures(
        count=len(values),
        mean=float(values.mean()),
        stddev=float(values.std()),
        quantile={percent: value for percent, value in found.items() if value is not None},
        histogram=tuple(count_cells(values, edges, least)),
    )


def _read_column(name: str, values: np.ndarray) -> Column | None:
    """Return a column of a cohort; None for text with very many labels."""
    if (numbers := _find_numbers(values)) is not None:
        present = numbers[np.isfinite(numbers)]
        return _label_marks(Column(name, "number", len(values) - len(present), present))
    labels = Counter(label_values(values, None))
    missing = labels.pop(MISSING, 0)
    return Column(name, "category", missing, np.zeros(0), labels) if len(labels) <= _MOST_LABELS else None


def _find_numbers(values: np.ndarray) -> np.ndarray | None:
    """Return a column as numbers; None: a cell is none, or has the leading zeros of a code."""
    if values.dtype.kind in "fiub":
        return values.astype(np.float64)
    if any(re.match("0[0-9]", text) for text in format_names(values)):
        return None
    try:
        return parse_numbers(values)
    except ValueError:
        return None


def _label_marks(column: Column) -> Column:
    """Return a column of 0 and 1 as one of labels: its mean is their share, and one of them may be rare."""
    if not len(column.numbers) or not np.isin(column.numbers, (0, 1)).all():
        return column
    labels = Counter(f"{value:.0f}" for value in column.numbers)
    return Column(column.name, column.kind, column.missing, np.zeros(0), labels)
