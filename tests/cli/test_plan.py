"""flare-sparse plan: what it takes; tests/tasks/nnunet and tests/flare/test_fingerprints.py test the plans."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flare_sparse.cli import app


@pytest.mark.parametrize("source", ["x.json", "missing"])
def test_source_that_is_neither_a_study_nor_a_folder_is_refused_with_what_is_taken(source: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    words = ["plan", str(tmp_path / source), "--out", str(tmp_path / "plan.json")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert result.exit_code == 2
    expected = "expected a study (.yaml or .yml) alone, or folders of raw data, each with its dataset.json"
    assert f"{tmp_path / source}: {expected}" in result.output
    assert not (tmp_path / "plan.json").exists()
