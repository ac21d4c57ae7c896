"""``flare-sparse bench``: a run's model timed dense, in ONNX Runtime and with sparse kernels."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from flare_sparse import load_model
from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.cli.bench import time_model
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.training import compute


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benched")
    file = folder / "brains.yaml"
    file.write_text(
        "name: brains\nseed: 1\nmethod: {name: neurosfl, sparsity: 0.95, rounds: 1}\n"
        "task: {name: brain_age, downsample: 4}\nsimulator: {sites: 2, data: {phantom: {subjects: 10}}}\n"
    )
    run_in_process(Study.load(file), RunFolder(folder / "run"))
    return folder / "run"


@pytest.mark.slow
def test_every_variant_is_timed_and_computes_the_same(run: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(run), "--repeats", "1", "--json"])
    assert result.exit_code == 0, result.output
    lines = json.loads(result.stdout)
    assert [(line["batch"], line["threads"]) for line in lines] == [(1, 1), (1, 2), (8, 1), (8, 2)]
    for line in lines:
        assert line["onnx_missing"] == ""
        assert min(line["dense_s"], line["onnx_s"], line["sparse_s"]) > 0
        assert line["ratio"] == pytest.approx(line["dense_s"] / line["sparse_s"])
        assert 0 <= line["difference"] < 1e-4


@pytest.mark.slow
def test_table_names_the_variants_and_the_difference(run: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(run), "--repeats", "1"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "dense / sparse" in result.output
    assert "largest difference of the outputs" in result.output


def test_record_has_the_choice_for_each_layer(run: Path) -> None:
    layers = json.loads((run / "layer_compute.json").read_text())
    assert list(layers) == ["site-1", "site-2"]
    assert set(layers["site-1"].values()) <= {"sparse", "dense"}
    assert "sparse" in layers["site-1"].values()
    names = {name for name, _ in load_model(run).named_modules()}
    assert set(layers["site-1"]) <= names


def test_loaded_model_computes_with_sparse_kernels(run: Path) -> None:
    x = torch.randn(2, 1, 13, 16, 13, generator=torch.Generator().manual_seed(1))
    compiled = load_model(run, compute="sparse")
    with torch.no_grad():
        assert torch.allclose(compiled(x), load_model(run)(x), atol=1e-5)
    # The kernels stand in for the forward of each convolution.
    assert any("forward" in vars(part) for part in compiled.modules())


def test_missing_numba_names_the_extra_and_no_setting(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["bench", str(run)], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "pip install 'flare-sparse[fast]'" in result.output
    assert "auto" not in result.output


@pytest.mark.slow
def test_interrupted_run_and_run_without_a_common_model_are_explained(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with pytest.raises(ConfigError, match=r"the run has no model, because it has not ended.*--resume"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="the run has no best model; leave --best out"):
        load_model(run, best=True)
    (tmp_path / "config.yaml").write_text(
        "name: brains\nmethod: {name: local_only}\ntask: {name: brain_age, downsample: 4}\n"
    )
    with pytest.raises(ConfigError, match=r"local_only trains no common model.*use a site's model with --site-model"):
        load_model(tmp_path)


def test_onnx_runtime_that_cannot_compute_a_network_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refused(Exception):
        """An exception as ONNX Runtime has them: of no common class."""

    def refuse(*arguments: object, **options: object) -> None:
        raise Refused("no kernel for this operator")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    lines = time_model(nn.Linear(3, 2).eval(), torch.ones(1, 3), 1)
    assert [line["onnx_s"] for line in lines] == [None] * 4
    assert all(line["onnx_missing"].endswith("exported to ONNX: no kernel for this operator") for line in lines)
    assert all(line["dense_s"] > 0 for line in lines)


class Pair(nn.Module):
    """A network with two outputs."""

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs, inputs


def test_network_with_two_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="whose output is one tensor, found tuple; time it in Python"):
        time_model(Pair(), torch.ones(1, 3), 1)
