"""Model of a finished run: loaded, saved and exported to ONNX with equal outputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from scipy.sparse import load_npz
from torch import nn
from typer.testing import CliRunner

from flare_sparse import load_model
from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.runs.exports import export_onnx
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.load import load_study
from flare_sparse.results.runs.model_files import read_mask, read_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    file = folder / "brains.yaml"
    file.write_text(
        "name: brains\nseed: 1\nmethod: {name: neurosfl, sparsity: 0.9, rounds: 2}\n"
        "task: {name: brain_age, downsample: 4, split: {validation: 0.2}}\n"
        "simulator: {sites: 2, data: {phantom: {subjects: 10}}}\n"
    )
    run_in_process(Study.load(file), RunFolder(folder / "run"))
    return folder / "run"


@pytest.mark.slow
def test_loaded_model_equals_the_record_and_is_masked(run: Path) -> None:
    model = load_model(run)
    layout, files = (
        load_study(run).assembly.layout,
        [run / name for name in ("model.safetensors", "best_model.safetensors")],
    )
    stored, best = (layout.unflatten(read_model(file, layout)) for file in files)
    mask = layout.unflatten(read_mask(files[0], layout).bits)
    assert not model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, stored[name])
        assert not bool((tensor[~mask[name]] != 0).any())
    assert all(torch.equal(t, best[n]) for n, t in load_model(run, "best").state_dict().items())


@pytest.mark.slow
def test_onnx_file_computes_the_same_outputs(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["save", str(run), "--format", "onnx", "--out", str(tmp_path / "saved")])
    assert result.exit_code == 0, result.output
    assert "model.onnx computes the same" in result.output
    x = torch.randn(3, 1, 13, 16, 13, generator=torch.Generator().manual_seed(1))
    session = onnxruntime.InferenceSession(str(tmp_path / "saved" / "model.onnx"), providers=["CPUExecutionProvider"])
    with torch.no_grad():
        expected = load_model(run)(x).numpy()
    assert np.allclose(session.run(None, {"input": x.numpy()})[0], expected, atol=1e-4)


class Drifting(nn.Module):
    """A network with random outputs, which an exported file cannot reproduce."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(torch.rand(()))


def test_onnx_file_with_other_outputs_is_deleted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="differs by"):
        export_onnx(Drifting().eval(), torch.ones(2, 3), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        load_model(tmp_path)


@pytest.mark.slow
def test_loaded_model_computes_with_sparse_kernels(run: Path) -> None:
    x = torch.randn(2, 1, 13, 16, 13, generator=torch.Generator().manual_seed(1))
    compiled = load_model(run, compute="sparse")
    with torch.no_grad():
        assert torch.allclose(compiled(x), load_model(run)(x), atol=1e-5)
    # The kernels stand in for the forward of each convolution.
    assert any("forward" in vars(part) for part in compiled.modules())


def test_interrupted_run_and_run_without_a_common_model_are_explained(tmp_path: Path) -> None:
    text = "name: brains\nmethod: {name: fedavg}\ntask: {name: brain_age, downsample: 4}\n"
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"the run has no model, because it has not ended.*--start last"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="the run has no best model; choose final"):
        load_model(tmp_path, "best")
    (tmp_path / "config.yaml").write_text(text.replace("fedavg", "local_only"))
    with pytest.raises(ConfigError, match=r"local_only trains no common model.*use a site's model with --model SITE"):
        load_model(tmp_path)


@pytest.mark.slow
def test_smallest_folder_loads_to_the_same_model_and_matrices_to_its_tensors(run: Path, tmp_path: Path) -> None:
    for form in ("sparse", "int8", "csr"):
        result = CliRunner().invoke(app, ["save", str(run), "--format", form, "--out", str(tmp_path / form)])
        assert result.exit_code == 0, result.output
        assert "the dense model takes" in result.output
    expected = load_model(run).state_dict()
    found, rounded = (load_model(tmp_path / name).state_dict() for name in ("sparse", "int8"))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor)
        assert float((rounded[name] - tensor).abs().max()) <= 0.02 * max(
            float(t.abs().max()) for t in expected.values()
        )
        matrix = load_npz(tmp_path / "csr" / "csr" / f"{name}.npz").toarray()
        assert np.array_equal(matrix.ravel(), tensor.numpy().ravel())
    sizes = [sum(f.stat().st_size for f in folder.glob("model.safetensors")) for folder in (tmp_path / "int8", run)]
    assert sizes[0] < sizes[1] < 0.2 * sum(tensor.nbytes for tensor in expected.values())
    refused = CliRunner().invoke(app, ["save", str(run), "--format", "compact"])
    assert refused.exit_code == 2
    assert "no unit or channel of this network is off" in " ".join(refused.output.split())
