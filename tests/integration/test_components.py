"""The stock jobs in FLARE's simulator: FLARE's controllers end with the model of the package's own run.

ScatterAndGather runs the components of FedSparsify; FLARE's FedAvg with them: benchmarks/exchange/components.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

PAGE = Path(__file__).parents[2] / "docs" / "components.md"
EXACT = ("scbf", "neurosfl", "ScatterAndGather")
"""Cells of which the package's own run trains by the same script: both sum in the order of site names."""


@pytest.fixture(scope="module")
def cells() -> ModuleType:
    return load_script("exchange/components")


def read_row(name: str) -> list[str]:
    """Return the row of a job in the table of the page."""
    match = re.search(rf"^\| {name} \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    assert match is not None
    return [cell.strip() for cell in match[1].split("|")]


@pytest.mark.long
@pytest.mark.parametrize("name", [*EXACT, "lora_a2", "metagater"])
def test_job_of_components_ends_as_the_page_says(name: str, cells: ModuleType) -> None:
    row = [cell.strip() for cell in cells.measure_cell(name).strip("|\n ").split("|")][1:]
    shown = read_row(name)
    assert [*row[:2], row[3]] == [*shown[:2], shown[3]]
    # Headers name the job, the sites and their folders.
    assert int(row[2].replace(",", "")) == pytest.approx(int(shown[2].replace(",", "")), rel=0.05)
    if name in EXACT:
        assert row[4] == shown[4] == "bit-equal"
    else:
        # The package trains on one minibatch of all examples in another order: sums of float32 in another order.
        assert float(row[4]) < 1e-5
