"""The notebooks of the docs run from top to bottom and show the expected results."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
EXPECTED_OUTPUT = {
    "what_does_a_method_buy": (
        "neurosfl sent",
        "x less than dense FedAvg (",
        "better than training alone at",
        "are not zero",
    ),
    "bring_my_own_job": (
        "messages, ",
        "server/simulate_job/sparse_exchange.jsonl",
        "with FedAvg",
        "of the weights are zero",
    ),
    "bring_my_own_task": ("READY 11 checks passed", "model sha256", "Linear(in_features=8"),
}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")))
def test_notebook_runs_and_shows_its_results(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "notebooks are stored without outputs"
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources=resources).execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    # A terminal that asks for colours gets them, also through a notebook.
    output = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed)
    assert [text for text in EXPECTED_OUTPUT[name] if text not in output] == [], output
