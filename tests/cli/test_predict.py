"""A finished segmentation: predictions as NIfTI on the images' own grids, and pictures in the report."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from line import call

from flare_sparse import load_model
from flare_sparse.compute.kernels import network
from flare_sparse.config.withdrawals import WITHDRAWN, Withdrawals
from flare_sparse.results.runs.load import load_study
from flare_sparse.results.runs.predictions import compute_pictures
from flare_sparse.results.runs.results import RunResult
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.tasks.models.base import Base, load_base
from flare_sparse.training import compute

SHAPE = (12, 16, 12)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the result folder of a run of two sites, and its data."""
    folder = tmp_path_factory.mktemp("run")
    brains = write_phantoms(folder / "brains", 2, 5, 0, SHAPE, labels=True)
    task = {
        "name": "segmentation",
        "classes": {"grey": 1, "white": 2, "ventricles": [7, 3]},
        "model": {"name": "dyn_unet", "channels": [2, 2, 4]},
        "patch": [8, 8, 8],
        "overlap": 0.0,
    }
    config = {
        "name": "seg",
        "method": {"name": "fedavg", "rounds": 1, "training": {"lr": 0.05, "batch_size": 2}},
        "task": task,
        "simulator": {"data": {"path": str(brains), "partition": {"kind": "natural"}}},
    }
    (folder / "seg.yaml").write_text(yaml.safe_dump(config))
    result = call("run", folder / "seg.yaml", "--env", "local", "--out", folder / "out")
    assert result.exit_code == 0, result.output
    return folder / "out", brains


def turn(file: Path, copy: Path) -> Path:
    """Write an image whose first axis runs to the left and whose other axes are exchanged, of the same brain."""
    image = nib.load(file)
    affine = image.affine @ np.array([[-1, 0, 0, SHAPE[0] - 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1.0]])
    copy.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj)[::-1].transpose(0, 2, 1), affine), copy)
    return copy


@pytest.mark.slow
def test_predictions_have_the_grid_of_their_images_in_every_orientation(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    run, brains = finished
    source = brains / "sub-01001" / "anat" / "sub-01001_T1w.nii.gz"
    images = tmp_path / "images"
    images.mkdir()
    shutil.copy(source, images / "plain.nii.gz")
    turned = turn(source, images / "turned.nii.gz")
    result = call("predict", run, images, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.output.strip().endswith("out: 2 predictions")
    plain, other = (nib.load(tmp_path / "out" / f"{name}_dseg.nii.gz") for name in ("plain", "turned"))
    assert np.array_equal(plain.affine, nib.load(source).affine)
    assert np.array_equal(other.affine, nib.load(turned).affine)
    assert other.get_data_dtype() == np.uint8
    values = np.asarray(plain.dataobj)
    assert np.array_equal(np.asarray(other.dataobj), values[::-1].transpose(0, 2, 1))
    # The first label of a class with several.
    assert set(np.unique(values).tolist()) <= {0, 1, 2, 7}
    assert len(np.unique(values)) > 1


@pytest.mark.slow
def test_data_set_of_the_run_is_predicted_by_case(finished: tuple[Path, Path], tmp_path: Path) -> None:
    run, brains = finished
    result = call("predict", run, brains, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert len(list((tmp_path / "out").glob("sub-*_dseg.nii.gz"))) == 10
    again = call("predict", run, brains, "--out", tmp_path / "out")
    assert again.exit_code != 0
    assert "is not empty; choose another folder" in again.output
    assert call("predict", run, brains).exit_code == 0
    assert len(list((run / "predictions" / brains.name).glob("sub-*_dseg.nii.gz"))) == 10
    Withdrawals(frozenset({"sub-01001"})).write(run)
    try:
        result = call("predict", run, brains, "--out", tmp_path / "fewer")
    finally:
        (run / WITHDRAWN).unlink()
    assert "9 predictions; 1 withdrawn subjects are left out" in result.output
    assert not list((tmp_path / "fewer").glob("sub-01001*"))


def read_labels(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(nib.load(file).dataobj) for file in sorted(folder.iterdir())])


@pytest.mark.slow
def test_sparse_predictions_agree_with_dense_ones(
    finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, brains = finished
    monkeypatch.setattr(network.is_sparse_faster, "__code__", (lambda work: True).__code__)
    built, build = [], network.build_blocks

    def record_blocks(*arguments: Any, **settings: Any) -> list[network.Block]:
        blocks = build(*arguments, **settings)
        built.extend(blocks)
        return blocks

    monkeypatch.setattr(network, "build_blocks", record_blocks)
    assert call("predict", run, brains, "--out", tmp_path / "auto").exit_code == 0
    assert any(block.is_sparse for block in built)
    monkeypatch.setattr(network.is_sparse_faster, "__code__", (lambda work: False).__code__)
    assert call("predict", run, brains, "--out", tmp_path / "dense").exit_code == 0
    dense, sparse = (read_labels(tmp_path / choice) for choice in ("dense", "auto"))
    assert len(np.unique(dense)) > 1
    assert (dense == sparse).mean() > 0.999
    patch = torch.randn(2, 1, 8, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = load_model(run)(patch), load_model(run, compute="sparse")(patch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_predictions_without_numba_are_dense(
    finished: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, brains = finished
    monkeypatch.setattr(compute, "find_spec", lambda name: None)
    monkeypatch.setattr(network, "compile_network", None)
    result = call("predict", run, brains, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_saved_network_with_a_module_of_several_names_is_a_base_model(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    result = call("save", finished[0], "--out", tmp_path)
    assert result.exit_code == 0, result.output
    trained, task = load_model(finished[0]), load_study(finished[0]).assembly.task
    network = task.model()
    load_base(network, tmp_path, Base(folder="base"))
    values = trained.state_dict()
    assert len(values) > len(list(trained.parameters()))
    assert all(torch.equal(value, values[name]) for name, value in network.state_dict().items())


def test_report_shows_the_best_the_median_and_the_worst_case_of_each_site(finished: tuple[Path, Path]) -> None:
    run, _ = finished
    result = call("report", run)
    assert result.exit_code == 0, result.output
    found = RunResult.read(run)
    study, predictions = load_study(run), found.predictions
    assert predictions is not None
    cases = compute_pictures(run, study.assembly, study.prepare_sites(run), predictions)
    assert [(case.site, case.rank) for case in cases] == [
        (site, rank) for site in ("site-1", "site-2") for rank in ("best", "median", "worst")
    ]
    assert cases[0].value >= cases[1].value >= cases[2].value
    assert cases[0].picture.image.shape == cases[0].picture.labels.shape == (SHAPE[1], SHAPE[0])
    assert (run / "report" / "cases.png").stat().st_size > 1000
    assert "This page contains images of subjects" in (run / "report" / "report.html").read_text()
    without = call("report", run, "--plain", "--out", run / "plain")
    assert without.exit_code == 0, without.output
    assert "images of subjects" not in (run / "plain" / "report.html").read_text()
