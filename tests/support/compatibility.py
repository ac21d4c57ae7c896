"""The tables of docs/compatibility.md: which method works with which feature, and why not. Run as a script to write."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flare_sparse.config.needs import AUDIT, CONTINUATION, FEATURES, Feature, match_needs
from flare_sparse.config.schema import JobConfig
from flare_sparse.methods.registry import METHODS

EXAMPLES: dict[str, dict[str, Any]] = {
    "wire.aggregation: masked": {"wire": {"aggregation": "masked"}, "federation": {"min_sites": 3}},
    "wire.values: int8, int4, int2, int1": {"wire": {"values": "int8"}},
    "wire.values: float16, bfloat16, bfloat16_zstd": {"wire": {"values": "float16"}},
    "wire.values": {"wire": {"values": "float32_zstd"}},
    "privacy": {"privacy": {"noise_multiplier": 1.0}},
    "task.script": {"task": {"script": "client.py", "model": "nets.Net"}},
    "federation.early_stopping": {
        "federation": {"early_stopping": {"patience": 3}},
        "task": {"split": {"validation": 0.2}},
    },
    "federation.clip_norm": {"federation": {"clip_norm": 1.0}},
    "federation.max_share": {"federation": {"max_share": 0.5}},
    "method.personal": {"method": {"personal": "head"}},
    "method.participation": {"method": {"participation": 0.5}},
    "method.training.schedule": {"method": {"training": {"schedule": {"kind": "cosine"}}}},
    "method.training.precision: bfloat16": {"method": {"training": {"precision": "bfloat16"}}},
    "method.training.compute: sparse": {"method": {"training": {"compute": "sparse"}}},
}
"""Settings of a job that has a feature, by its name; of the others a job has no choice."""


def list_columns() -> list[Feature]:
    """Return the features that some method does not work with by its default settings."""
    return [feature for feature in (*FEATURES.values(), CONTINUATION, AUDIT) if any(find_reasons(feature).values())]


def find_reasons(feature: Feature) -> dict[str, str]:
    """Return why each method does not work with a feature by its default settings; empty: it does."""
    missing = {name: match_needs(method.Config().needs(), feature) for name, method in METHODS.items()}
    return {name: " and ".join(dict.fromkeys(need.reason for need in needs)) for name, needs in missing.items()}


def list_pairs() -> Iterator[tuple[Feature, Feature, str]]:
    """Yield each two features that exclude each other, and why: what the first one takes away, the second one needs."""
    for second in FEATURES.values():
        job = None if second.name == "task.script" else _build_job(second)
        for first in FEATURES.values():
            missing = match_needs(second.needs(job), first)
            if missing and first is not second:
                yield first, second, missing[0].reason


def _build_job(feature: Feature) -> JobConfig:
    """Return a job with a feature, whose own conflicts do not matter here."""
    settings = {"name": "job", "method": {"name": "fedavg"}, "task": {"name": "brain_age"}}
    for section, values in EXAMPLES.get(feature.name, {}).items():
        settings[section] = {**settings.get(section, {}), **values}  # type: ignore[dict-item]
    return JobConfig.model_validate(settings)


def tabulate_methods() -> list[list[str]]:
    """Return ``docs/compatibility_methods.csv``: methods by features; features alike are one column."""
    columns = list(_group_features().values())
    head = ["method", *(", ".join(feature.name for feature in features) for features in columns)]
    marks = [["no" if find_reasons(features[0])[method] else "yes" for features in columns] for method in METHODS]
    return [head, *([method, *row] for method, row in zip(METHODS, marks, strict=True))]


def tabulate_refusals() -> list[list[str]]:
    """Return ``docs/compatibility_reasons.csv``: each feature, the methods or features it excludes, and why."""
    excluded: dict[tuple[str, str], list[str]] = {}
    for texts, features in _group_features().items():
        for method, text in zip(METHODS, texts, strict=True):
            if text:
                excluded.setdefault((", ".join(feature.name for feature in features), text), []).append(method)
    for first, second, reason in list_pairs():
        excluded.setdefault((second.name, reason), []).append(first.name)
    rows = [[name, ", ".join(others), reason] for (name, reason), others in excluded.items()]
    return [["feature", "does not work with", "why"], *rows]


def _group_features() -> dict[tuple[str, ...], list[Feature]]:
    """Return the features of :func:`list_columns` that exclude the same methods for the same reasons together."""
    groups: dict[tuple[str, ...], list[Feature]] = {}
    for feature in list_columns():
        groups.setdefault(tuple(find_reasons(feature).values()), []).append(feature)
    return groups


def format_csv(rows: list[list[str]]) -> str:
    """Return rows as the text of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


if __name__ == "__main__":
    for name, rows in (("methods", tabulate_methods()), ("reasons", tabulate_refusals())):
        Path(f"docs/compatibility_{name}.csv").write_text(format_csv(rows), encoding="utf-8")
