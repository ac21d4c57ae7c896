"""Columns of a table as inputs of a network: numbers, one-hot categories, and indicators of missing values.

Columns of FreeSurfer tables, named as FreeSurfer names them, and constants of anatomy that scale them.

With constants, no site has to reveal its own statistics:

* thickness in mm (columns ending in ``_thickness``): ``(t - 2.5) / 0.5``; the human cortex is 1 to 4.5 mm thick, 2.5 mm
  on average (Fischl and Dale 2000, PNAS 97:11050);
* intracranial volume (column ``ICV``): ``(litres - 1.5) / 0.2``;
* volume in mm3 (every other number): ``(ln(per mille of ICV) - 1) / 2``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml

from ...core.errors import DataError
from ...core.names import find_similar
from .tables import MISSING, Table

Labels = tuple[str | tuple[str, tuple[str, ...]], ...]
"""Labels in order; one that stands for several of the table is a pair: ``("disease", ("1", "2"))``."""


@dataclass(frozen=True)
class Features:
    """Inputs of all rows of a table.

    Attributes:
        values: ``(n, d)`` float64; NaN where a number is missing.
        names: ``(d,)`` names of the inputs: ``age``, ``sex=F``, ``age missing``.
        numbers: ``(d,)`` bool: inputs that are scaled.
        missing: ``(n, columns)`` bool: values that the table lacks.
        columns: names of the columns.
    """

    values: np.ndarray
    names: tuple[str, ...]
    numbers: np.ndarray
    missing: np.ndarray
    columns: tuple[str, ...]

    def scale(self, center: np.ndarray, spread: np.ndarray) -> Features:
        """Return the features with numbers minus ``center``, divided by ``spread``, both ``(d,)``."""
        scaled = np.where(self.numbers, (self.values - center) / spread, self.values)
        return replace(self, values=scaled)

    def complete(self, clip: float | None) -> np.ndarray:
        """Return scaled values with a missing number at 0, the center, and numbers between ``-clip`` and ``clip``."""
        values: np.ndarray = np.nan_to_num(self.values, nan=0.0)
        return values if clip is None else np.where(self.numbers, np.clip(values, -clip, clip), values)

    def describe_missing(self, row: int) -> str:
        """Return which columns a row lacks; empty if it is complete."""
        names = [self.columns[i] for i in np.flatnonzero(self.missing[row])]
        return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def number_labels(labels: Labels) -> dict[str, int]:
    """Return the position of every label of the table.

    >>> number_labels(("none", ("disease", ("1", "2"))))
    {'none': 0, '1': 1, '2': 1}
    """
    groups = [(label,) if isinstance(label, str) else label[1] for label in labels]
    return {label: position for position, group in enumerate(groups) for label in group}


def name_labels(labels: Labels) -> list[str]:
    """Return the names of labels, in order; that of merged ones is the name of the group."""
    return [label if isinstance(label, str) else label[0] for label in labels]


def list_inputs(
    columns: Sequence[str], categories: Mapping[str, Labels], *, has_indicators: bool
) -> list[tuple[str, bool]]:
    """Return the name of each input and whether it is a number; server and sites must agree on them without data.

    Arguments are those of :func:`encode_features`.
    """
    inputs = []
    for name in columns:
        labels = categories.get(name)
        inputs += [(name, True)] if labels is None else [(f"{name}={label}", False) for label in name_labels(labels)]
    return inputs + [(f"{name} missing", False) for name in columns if has_indicators]


def encode_features(
    table: Table, columns: Sequence[str], categories: Mapping[str, Labels], *, has_indicators: bool
) -> Features:
    """Return the inputs of every row: a number, or 0 and 1 for each category, column by column, then the indicators.

    Args:
        table: the table.
        columns: names of the columns, in order.
        categories: the categories of the columns that have any, in order.
        has_indicators: whether each column has one more input that is 1 where its value is missing.

    Raises:
        DataError: columns are missing, columns of numbers contain text, or categories are unknown; it names all of
            them.
    """
    parts, missing, problems, texts = [], [], [], []
    for name in columns:
        try:
            values, absent = _encode_column(table, name, categories.get(name))
        except DataError as error:
            if name in categories or name not in table.columns or table.find_date(name) or not table.is_text(name):
                problems.append(str(error))
            else:
                texts.append(name)
            continue
        parts.append(values)
        missing.append(absent)
    if texts:
        problems.append(_describe_texts(table, texts))
    if problems:
        raise DataError("\n".join(problems))
    marks = np.stack(missing, axis=1)
    if has_indicators:
        parts.append(marks.astype(np.float64))
    inputs = list_inputs(columns, categories, has_indicators=has_indicators)
    names, numbers = zip(*inputs, strict=True)
    return Features(np.hstack(parts), names, np.array(numbers), marks, tuple(columns))


def compute_scale(features: Features, rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation ``(d,)`` of the numbers over some rows; 1 where they do not vary."""
    center, spread = np.zeros(len(features.names)), np.ones(len(features.names))
    for column in np.flatnonzero(features.numbers):
        present = features.values[list(rows), column]
        present = present[np.isfinite(present)]
        if len(present):
            center[column], deviation = present.mean(), present.std()
            # The mean of equal values such as 0.1 is rounded, so that their deviation is about 1e-17 instead of 0. No
            # more than rounding: seconds since 1970 differ by 1e-9 of their value.
            if deviation > 1e-12 * np.abs(present).max():
                spread[column] = deviation
    return center, spread


def read_labels(table: Table, name: str, declared: Collection[str] = ()) -> list[str]:
    """Return a column as names; empty where a value is missing.

    A text such as ``None`` marks a missing value, unless it is among the ``declared`` labels.
    """
    return [text if text in declared or text.lower() not in MISSING else "" for text in table.get_names(name)]


def format_labels(labels: Sequence[str]) -> str:
    """Return labels as a list in YAML, each in quotes, so that it is read as text; at most ten."""
    shown = labels if len(labels) <= 10 else [*labels[:10], "..."]
    return json.dumps(shown, ensure_ascii=False)


def _encode_column(table: Table, name: str, categories: Labels | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs ``(n, d)`` of a column, and which rows have no value."""
    if categories is None:
        numbers = table.get_numbers(name)
        return numbers[:, None], np.isnan(numbers)
    position = number_labels(categories)
    labels = read_labels(table, name, position)
    if unknown := sorted({label for label in labels if label} - set(position)):
        similar = find_similar(unknown[0], position)
        hint = f", but {similar!r} is; names are compared character by character" if similar else ""
        raise DataError(
            f"{table.source}: column {name!r} has {unknown[0]!r} (row {labels.index(unknown[0]) + 1}), which is none "
            f"of its categories {', '.join(position)}{hint}; add it to task.categories.{name} for all sites, or "
            "correct the data"
        )
    numbers = np.array([position.get(label, -1) for label in labels])
    return (numbers[:, None] == np.arange(len(categories))).astype(np.float64), numbers < 0


def _describe_texts(table: Table, names: Sequence[str]) -> str:
    """Return the problem of columns of text that are not among the categories, with the setting that mends it."""
    found = {name: sorted({label for label in read_labels(table, name) if label}) for name in names}
    categories = ", ".join(
        f"{json.dumps(name, ensure_ascii=False)}: {format_labels(labels)}" for name, labels in found.items()
    )
    first, labels = next(iter(found.items()))
    row = table.get_names(first).index(labels[0]) + 1
    return (
        f"{table.source}: column {first!r} contains text such as {labels[0]!r} (row {row}); expected numbers. If it is "
        f"a category, set task.categories: {{{categories}}} with the categories of all sites"
    )


def _read_atlases() -> dict[str, tuple[str, ...]]:
    names = yaml.safe_load(Path(__file__).with_name("atlases.yaml").read_text(encoding="utf-8"))
    thickness = {
        atlas: [f"{side}_{region}_thickness" for side in ("lh", "rh") for region in names[atlas]]
        for atlas in ("destrieux", "desikan")
    }
    return {
        "destrieux": tuple(sorted(["ICV", *names["volumes"], *thickness["destrieux"]])),
        "desikan": tuple(sorted(["ICV", *thickness["desikan"]])),
    }


ATLASES = _read_atlases()
"""Feature columns by atlas, in name order, which is their order in the network's input."""


def scale_anatomically(features: Features) -> Features:
    """Return the features with numbers scaled by the constants in the module's docstring.

    Raises:
        DataError: an intracranial volume is not above 0.
    """
    litre, values = 1e6, features.values.copy()
    icv = features.values[:, features.names.index("ICV")] if "ICV" in features.names else np.array(np.nan)
    if len(rows := np.flatnonzero(icv <= 0)):
        raise DataError(f"column 'ICV' is {icv[rows[0]]:g} (row {rows[0] + 1}); expected volumes in mm3, above 0")
    for position in np.flatnonzero(features.numbers):
        name, column = features.names[position], features.values[:, position]
        if name.endswith("_thickness"):
            values[:, position] = (column - 2.5) / 0.5
        elif name == "ICV":
            values[:, position] = (column / litre - 1.5) / 0.2
        else:
            values[:, position] = (np.log(np.maximum(column, 1.0) / icv * 1000) - 1) / 2
    return replace(features, values=values)
