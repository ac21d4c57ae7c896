"""The first study that ``flare-sparse init table --data`` writes of a table: each choice is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import DataError, list_first
from ..tasks.data.tables import Spelling, Table, read_table
from .yaml_files import format_yaml

SITE_NAMES = ("hospital", "site", "center", "centre", "clinic", "region", "institution", "ward", "klinik", "zentrum")
TARGET_NAMES = ("target", "outcome", "label", "died", "death", "event", "readmitted", "diagnosis", "tod", "y")
ID_NAMES = ("id", "patient", "patient_id", "subject", "subject_id", "participant_id", "case")
NEGATIVES = ("no", "nein", "non", "n", "false", "negative", "neg", "none", "control", "healthy", "alive", "absent")
"""Labels of the absence of what is predicted: of two labels, the other one is class 1."""
STEP = {"rounds": 100, "server": {"optimizer": "adam", "lr": 0.02}, "model_average": {"kind": "ema"}}
"""One step a round on all examples of a site, so that the mean of the steps is that on all sites' examples."""
DECAY, TRAINED = 0.3, 0.7
"""Weight decay of a table with as many inputs as training rows, and the share of the rows that train
(docs/results/tables.md)."""
MOST_LABELS = 12
"""A column of text with more different values is no category: it is left out, and named."""


def describe_table(path: Path) -> tuple[str, list[str]]:
    """Return a study of a table as YAML, and what was inferred from it, in sentences.

    The target is the column with a usual name, or the last one; the sites are those of a column with a usual name, or
    three at random.

    Raises:
        DataError: the table cannot be read, or has too few columns.
    """
    table = _find_decimal(read_table(path))
    names = list(table.columns)
    site, identifier = _find(names, SITE_NAMES), _find(names, ID_NAMES)
    rest = [name for name in names if name not in (site, identifier)]
    if len(rest) < 2:
        raise DataError(f"{path}: expected a target and at least one feature, found {list_first(rest, 5)}")
    target = _find(rest, TARGET_NAMES) or rest[-1]
    kind, classes = _describe_target(table, target)
    numbers, categories, left_out = _sort_features(table, [name for name in rest if name != target])
    features = [name for name in rest if name in numbers or name in categories]
    if not features:
        raise DataError(f"{path}: no column besides {target!r} has numbers or at most {MOST_LABELS} labels")
    task: dict[str, Any] = {"name": "table", "kind": kind, "target": target}
    task |= {"classes": classes} if classes else {}
    task |= {"features": features} | ({"categories": categories} if categories else {})
    has_commas = table.spelling.decimal == ","
    task |= {"decimal": ","} if has_commas else {}
    if identifier:
        ids = table.get_names(identifier)
        task["id" if len(set(ids)) == len(ids) else "group"] = identifier
    task |= {"missing": "impute", "scaling": "federated", "clip": 5, "model": {"name": "resnet_mlp"}}
    task |= {"split": {"validation": 0.1}}
    task |= {"target_scale": _describe_scale(table, target)} if kind == "regression" else {}
    sites = {"kind": "natural", "column": site} if site else {"kind": "iid"}
    simulator: dict[str, Any] = {} if site else {"sites": 3}
    inputs = sum(len(categories.get(name, [name])) for name in features)
    decay = float(f"{DECAY * inputs / (TRAINED * table.rows):.2g}")
    training = {"optimizer": "sgd", "lr": 0.1, "epochs": 1, "batch_size": 4096, "weight_decay": decay}
    study = {
        "name": "study",
        "seed": 1,
        "method": {"name": "neurosfl", "sparsity": 0.9, **STEP, "training": training},
        "task": task,
        "simulator": simulator | {"data": {"path": str(path.resolve()), "partition": sites}},
    }
    notes = [
        f"{table.rows} rows; target {target}: {kind}" + (f" of {', '.join(classes)}" if classes else ""),
        *([f"what is predicted, class 1: {target} {classes[1]}"] if kind == "binary" and classes else []),
        f"sites: column {site}" if site else "sites: no column with a usual name, so three at random",
        f"{len(features)} features, {len(categories)} of them categories" + "; decimal commas" * has_commas,
        *([f"left out, neither numbers nor few labels: {list_first(left_out, 5)}"] if left_out else []),
    ]
    header = "".join(f"# {note}\n" for note in (f"Written from {path.name}. Correct what is wrong:", *notes))
    return header + format_yaml(study), notes


def _find_decimal(table: Table) -> Table:
    """Return the table with the decimal mark by which more of its columns are numbers; a point, if none."""
    tables = table, replace(table, spelling=Spelling(decimal=","), _numbers={})
    return min(tables, key=lambda spelled: sum(map(spelled.is_text, spelled.columns)))


def _find(names: list[str], usual: tuple[str, ...]) -> str | None:
    return next((name for name in names if name.lower() in usual), None)


def _list_labels(table: Table, name: str) -> list[str]:
    return sorted({label for label in table.get_names(name) if label})


def _describe_target(table: Table, name: str) -> tuple[str, list[str]]:
    """Return the kind of a target, and its labels where these are text."""
    if table.is_text(name):
        labels = _list_labels(table, name)
        if not 2 <= len(labels) <= MOST_LABELS:
            raise DataError(
                f"target {name!r}: expected numbers or 2 to {MOST_LABELS} labels, found {len(labels)} labels. Name the "
                f"target's column as one of {', '.join(TARGET_NAMES)}, or make it the last one"
            )
        labels.sort(key=lambda label: label.lower() not in NEGATIVES)
        return ("binary" if len(labels) == 2 else "classes"), labels
    return ("binary" if set(table.get_numbers(name).tolist()) <= {0.0, 1.0} else "regression"), []


def _describe_scale(table: Table, name: str) -> list[float]:
    """Return mean and standard deviation of a column, to three digits."""
    numbers = table.get_numbers(name)
    return [float(f"{value:.3g}") for value in (np.nanmean(numbers), np.nanstd(numbers) or 1.0)]


def _sort_features(table: Table, names: list[str]) -> tuple[set[str], dict[str, list[str]], list[str]]:
    """Return the columns of numbers, the labels of each category, and the columns that are neither."""
    numbers: set[str] = set()
    categories: dict[str, list[str]] = {}
    left_out = []
    for name in names:
        labels = _list_labels(table, name) if table.is_text(name) else []
        if not labels and not table.find_date(name):
            numbers.add(name)
        elif 2 <= len(labels) <= MOST_LABELS:
            categories[name] = labels
        else:
            left_out.append(name)
    return numbers, categories, left_out
