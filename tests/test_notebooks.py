"""The notebooks of the docs run from top to bottom."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=400, kernel_name="python3", resources=where).execute()
    shown = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert shown
