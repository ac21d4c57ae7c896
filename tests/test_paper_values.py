"""Defaults of the five papers' methods: those of the paper, or a deviation that docs/algorithms.md lists."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flare_sparse.methods.method import MethodConfig
from flare_sparse.methods.registry import METHODS

DOCS = Path(__file__).parents[1] / "docs"
with (DOCS / "paper_values.csv").open(newline="", encoding="utf-8") as table:
    ROWS = list(csv.DictReader(table))
ADDITIONS = {
    "fedsparsify": {"server", "model_average", "finetune"},
    "scbf": {"budget"},
    "scbfwp": {"target_pruned_fraction"},
    "lora_a2": {"ranks", "budget"},
    "neurosfl": {
        "budget", "server", "model_average", "iter_snip", "iterations", "score_share",
        "random_layers", "random_site",
    },
    "metagater": {"adapt_lr", "targets"},
}  # fmt: skip
"""Settings for which a paper has no value: additions, variants of what is off by default, and values not printed."""


def find_entries(text: str) -> set[str]:
    """Return the numbers of all deviations, such as ``3.12.5``."""
    entries = set()
    for number, title, body in re.findall(r"^### (\d+\.\d+) ([^\n]*)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL):
        if "eviations" in title:
            entries |= {f"{number}.{item}" for item in re.findall(r"^(\d+)\. ", body, re.MULTILINE)}
    return entries


def find_missing(row: dict[str, str], config: type[BaseModel], entries: set[str]) -> str:
    """Return what is wrong with a row of the table; empty if its default is the paper's or its deviation exists."""
    found: Any = config.model_fields[row["setting"]].default
    paper = row["paper"]
    is_equal = paper == "varied" or paper == (found if isinstance(found, str) else json.dumps(found))
    if row["entry"]:
        return "" if row["entry"] in entries else f"docs/algorithms.md has no deviation {row['entry']}"
    return "" if is_equal else f"default {found!r}, paper {paper}, and no deviation is named"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['method']}.{row['setting']}")
def test_default_is_that_of_the_paper_or_a_listed_deviation(row: dict[str, str]) -> None:
    entries = find_entries((DOCS / "algorithms.md").read_text(encoding="utf-8"))
    assert find_missing(row, METHODS[row["method"]].Config, entries) == ""


def test_every_setting_of_the_five_papers_has_a_row_or_is_an_addition() -> None:
    inherited = {"scbfwp": set(METHODS["scbf"].Config.model_fields)}
    for method, additions in ADDITIONS.items():
        own = set(METHODS[method].Config.model_fields) - set(MethodConfig.model_fields) - inherited.get(method, set())
        rows = {row["setting"] for row in ROWS if row["method"] == method}
        assert own - rows <= additions, f"{method}: name the paper's value in docs/paper_values.csv"
        assert rows <= own


def test_changed_default_and_unlisted_deviation_are_found() -> None:
    row = {"method": "neurosfl", "setting": "min_per_layer", "paper": "0", "entry": ""}
    config = METHODS["neurosfl"].Config
    assert find_missing(row, config, set()) == "default 1, paper 0, and no deviation is named"
    assert find_missing({**row, "entry": "5.7.99"}, config, {"5.7.7"}) == "docs/algorithms.md has no deviation 5.7.99"
    assert find_entries("### 5.7 Deviations\n\n1. one\n2. two\n   1. inner\n\n### 5.8 Other\n\n1. no\n") == {
        "5.7.1",
        "5.7.2",
    }
