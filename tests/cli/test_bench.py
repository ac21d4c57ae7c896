"""``flare-sparse bench``: a run's model timed dense, in ONNX Runtime and with sparse kernels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flare_sparse import load_model
from flare_sparse.cli import app
from flare_sparse.cli.local import run_config_locally
from flare_sparse.config import load_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benched")
    file = folder / "brains.yaml"
    file.write_text(
        "name: brains\nseed: 1\nmethod: {name: neurosfl, sparsity: 0.95, rounds: 1}\n"
        "task: {name: brain_age, downsample: 4}\nsimulator: {sites: 2, data: {phantom: {subjects: 10}}}\n"
    )
    run_config_locally(load_config(file), file, folder / "run")
    return folder / "run"


def test_every_variant_is_timed_and_computes_the_same(run: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(run), "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    lines = json.loads(result.stdout)
    assert [(line["batch"], line["threads"]) for line in lines] == [(1, 1), (1, 2), (8, 1), (8, 2)]
    for line in lines:
        assert min(line["dense_s"], line["onnx_s"], line["sparse_s"]) > 0
        assert line["ratio"] == pytest.approx(line["dense_s"] / line["sparse_s"])
        assert 0 <= line["difference"] < 1e-4


def test_table_names_the_variants_and_the_difference(run: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(run), "--repeats", "1"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "dense / sparse" in result.output
    assert "largest difference of the outputs" in result.output


def test_loaded_model_computes_with_sparse_kernels(run: Path) -> None:
    x = torch.randn(2, 1, 13, 16, 13, generator=torch.Generator().manual_seed(1))
    compiled = load_model(run, compute="sparse")
    with torch.no_grad():
        assert torch.allclose(compiled(x), load_model(run)(x), atol=1e-5)
    # The kernels stand in for the forward of each convolution.
    assert any("forward" in vars(part) for part in compiled.modules())
