"""The task nnunet: a plan's network trained by the methods, its predictions, and its model folder in nnU-Net."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from nnunet_data import SHAPE, require_nnunet, shrink, write_bids, write_case, write_raw
from torch import nn

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import load_config, parse_job
from flare_sparse.core.errors import ConfigError, DataError
from flare_sparse.core.seeds import limit_threads
from flare_sparse.rounds.local.run import run_locally
from flare_sparse.tasks.nnunet.fingerprint import compute_fingerprint, merge_fingerprints
from flare_sparse.tasks.nnunet.plan import build_plan, check_plan
from flare_sparse.tasks.nnunet.task import Nnunet
from flare_sparse.tasks.task import SiteData

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
METHODS: list[dict[str, Any]] = [
    {"name": "fedavg"},
    {"name": "neurosfl", "sparsity": 0.9},
    {"name": "fedsparsify", "sparsity": 0.9},
    {"name": "topk_ef", "fraction": 0.05},
    {"name": "fedavg", "personal": ["decoder.seg_layers.*"]},
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with the data of two sites, and a small plan for both."""
    require_nnunet()
    root = tmp_path_factory.mktemp("nnunet")
    folders = [write_raw(root / f"site-{number}", 4, number) for number in (1, 2)]
    merged = merge_fingerprints([compute_fingerprint(folder, 1000) for folder in folders])
    plan = shrink(build_plan(merged, "Dataset001_Boxes"))
    (root / "plan.json").write_text(json.dumps(plan))
    return root, plan


@pytest.mark.parametrize(
    "method", METHODS, ids=lambda method: f"{method['name']}{'_personal' * ('personal' in method)}"
)
def test_methods_train_and_evaluate_the_plan(method: dict[str, Any], federation: tuple[Path, dict[str, Any]]) -> None:
    root, plan = federation
    training = {"batch_size": 2, "optimizer": "sgd", "momentum": 0.9, "nesterov": True, "schedule": {"kind": "poly"}}
    settings = {"rounds": 1, "training": training, **method}
    job = parse_job(
        {"name": "a", "method": settings, "task": {"name": "nnunet", "plan": plan, "split": {"test": 0.25}}}
    )
    assembly = assemble(job)
    sites = {name: open_site(assembly, SiteData(name, root / name)) for name in ("site-1", "site-2")}
    outcome, _ = run_locally(assembly.method, assembly.weights, sites, assembly.task.metric)
    assert outcome.evaluation.overall.keys() >= {"dice", "dice_front", "dice_back"}
    assert outcome.evaluation.sites["site-1"]["test_examples"] == 1
    assert not torch.equal(outcome.weights, assembly.weights)


def test_patches_and_their_augmentation_are_repeated_by_the_seed(federation: tuple[Path, dict[str, Any]]) -> None:
    root, plan = federation
    task = Nnunet({"plan": plan})
    cases = [task.load(SiteData("site-1", root / "site-1"), 0).train[index] for index in (0, 1)]
    patch = plan["plans"]["configurations"]["3d_fullres"]["patch_size"]

    state = np.random.get_state()[1].copy()  # noqa: NPY002
    (images, targets), (again, _), (other, _) = (
        task.augment(cases, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert images.shape == (2, 1, *patch)
    assert targets[0].shape == images.shape
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
    # The last third of a minibatch has a voxel of a class.
    assert int(targets[0][1].max()) > 0


def test_plan_is_read_from_a_file_and_names_no_other_code(
    federation: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    root, plan = federation
    config = {
        "name": "a",
        "method": {"name": "fedavg"},
        "task": {"name": "nnunet", "plan": str(root / "plan.json")},
        "simulator": {"sites": 2, "data": {"path": str(root / "{site}")}},
    }
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(config))
    settings = load_config(file).task.config
    assert settings.plan == plan  # type: ignore[attr-defined]
    assert Nnunet.Config.model_validate(settings.model_dump(mode="json")) == settings
    assert [name for name, info in Nnunet.Config.model_fields.items() if not info.description] == []

    with pytest.raises(ConfigError, match=r"task\.plan is missing: flare-sparse plan STUDY"):
        Nnunet({}).model()
    bad = shrink(plan)
    bad["plans"]["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]["nonlin"] = "os.system"
    with pytest.raises(ConfigError, match=r"arch_kwargs\.nonlin: .*'torch\.nn\.ReLU', found 'os\.system'"):
        check_plan(bad)
    with pytest.raises(ConfigError, match=r"task.*os\.system"):
        parse_job({"name": "a", "method": {"name": "fedavg"}, "task": {"name": "nnunet", "plan": bad}})
    with pytest.raises(ConfigError, match=r"privacy.*task\.plan: was computed from all subjects"):
        load_config(file, ["privacy={noise_multiplier: 1.0}"])


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("patch_size",), [4096, 4096, 4096], r"patch_size: found .*, over 134,217,728 voxels"),
        (("patch_size",), [16.0, 16, 16], r"patch_size\.0: Input should be a valid integer, found 16\.0"),
        (("spacing",), [0.0, 1.0, 1.0], r"spacing\.0: Input should be greater than 0, found 0\.0"),
        (("batch_size",), float("nan"), "a number that is not finite"),
        (
            ("architecture", "arch_kwargs", "n_stages"),
            99,
            r"n_stages: Input should be less than or equal to 10, found 99",
        ),
        (
            ("architecture", "arch_kwargs", "n_conv_per_stage"),
            [20000, 1, 1],
            r"n_conv_per_stage\.0: Input should be less than or equal to 32, found 20000",
        ),
        (("architecture", "_kw_requires_import"), [], r"_kw_requires_import: List should have at least 4 items"),
        (
            ("architecture", "_kw_requires_import"),
            ["conv_op", "conv_op", "norm_op", "nonlin"],
            r"_kw_requires_import: found \['conv_op', 'conv_op', 'norm_op', 'nonlin'\]; expected each argument once",
        ),
        (("architecture", "arch_kwargs", "strides"), [[1, 1]], r"strides: found .* entries, for n_stages"),
        (("architecture", "arch_kwargs", "colour"), 1, r"arch_kwargs\.colour: Extra inputs are not permitted"),
        (("spacing",), [1.0, 1.0], r"spacing, .* found \[1\.0, 1\.0\]; expected 3 numbers"),
        ((..., "labels"), 3, r"dataset\.labels: Input should be a valid dictionary, found 3"),
        ((..., "labels"), {"front": 1, "back": 2}, r"dataset: labels: .*background"),
        ((..., "labels"), {"background": 0, "whole": [1, 2]}, "regions need regions_class_order"),
        ((..., "channel_names"), {"1": "MRI"}, r"dataset: channel_names: expected names by number"),
    ],
)
def test_plan_that_asks_for_too_much_or_says_nothing_is_refused(
    place: tuple[Any, ...], value: Any, reason: str, federation: tuple[Path, dict[str, Any]]
) -> None:
    plan = shrink(federation[1])
    *path, last = place
    entry = plan["dataset"] if path == [...] else plan["plans"]["configurations"]["3d_fullres"]
    for key in path if entry is not plan["dataset"] else ():
        entry = entry[key]
    entry[last] = value
    with pytest.raises(ConfigError, match=reason):
        check_plan(plan)


def test_plan_that_nnunet_does_not_read_or_that_needs_much_memory_is_refused(
    federation: tuple[Path, dict[str, Any]],
) -> None:
    root, plan = federation
    odd = shrink(plan)
    odd["plans"]["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"]["norm_op_kwargs"] = {"colour": 1}
    with pytest.raises(ConfigError, match=r"task\.plan: nnU-Net does not read it"):
        Nnunet({"plan": odd}).model()
    fine = shrink(plan)
    fine["plans"]["configurations"]["3d_fullres"]["spacing"] = [1e-3, 1e-3, 1e-3]
    with pytest.raises(DataError, match=r"voxels of .* mm, as the plan asks"):
        Nnunet({"plan": fine}).load(SiteData("site-1", root / "site-1"), 0)


def test_data_that_the_plan_is_not_for_is_refused(federation: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, plan = federation
    task, folder = Nnunet({"plan": plan}), write_raw(tmp_path / "raw", 2)
    labels = folder / "labelsTr" / "case01.nii.gz"
    nib.save(nib.Nifti1Image(np.full(SHAPE, 7, np.uint8), np.eye(4)), labels)
    with pytest.raises(DataError, match=r"case01: case01\.nii\.gz: label 7 is none of dataset\.json's labels"):
        task.load(SiteData("s", folder), 0)
    labels.unlink()
    with pytest.raises(DataError, match="case01: missing file: there is no label map"):
        task.load(SiteData("s", folder), 0)
    with pytest.raises(DataError, match="case01: missing file: there is no label map"):
        compute_fingerprint(folder, 1000)
    assert compute_fingerprint(folder, 1000, skip_bad_subjects=True).cases == 1
    content = json.loads((folder / "dataset.json").read_text())
    (folder / "dataset.json").write_text(json.dumps({**content, "labels": {"background": 0, "front": 1}}))
    with pytest.raises(DataError, match=r"dataset\.json: labels is .*; the plan is for"):
        task.load(SiteData("s", folder), 0)


def test_bids_has_the_fingerprint_of_the_raw_data_and_keeps_subjects_together(tmp_path: Path) -> None:
    require_nnunet()
    raw = write_raw(tmp_path / "raw", 6)
    folder = write_bids(tmp_path / "bids", raw)
    found, expected = (compute_fingerprint(data, 1000) for data in (folder, raw))
    assert found.model_copy(update={"dataset": expected.dataset}) == expected
    with pytest.raises(DataError, match="3 subjects have foreground, the minimum is 4"):
        compute_fingerprint(folder, 1000, least=4)
    task = Nnunet({"plan": shrink(build_plan(found, "Dataset001_Boxes")), "split": {"test": 0.34}})
    (folder / "participants.tsv").write_text("participant_id\tsite\nsub-0\tA\nsub-1\tB\nsub-2\tA\n")
    assert task.cohort(folder).columns["site"].tolist() == ["A", "A", "B", "B", "A", "A"]
    examples = task.load(SiteData("s", folder), 0)
    subjects = [{name.partition("_")[0] for name in part} for part in (examples.train_ids, examples.test_ids)]
    assert [len(part) for part in (examples.train_ids, examples.test_ids)] == [4, 2]
    assert subjects[0].isdisjoint(subjects[1])
    withdrawn = task.load(SiteData("s", folder, withdrawn=frozenset({"sub-1"})), 0)
    assert {name.partition("_")[0] for name in (*withdrawn.train_ids, *withdrawn.test_ids)} == {"sub-0", "sub-2"}

    written = list(task.write_predictions(Threshold(), SiteData("new", folder), tmp_path / "out"))
    assert [file.name for file in written] == [f"sub-{i}_ses-{j}.nii.gz" for i in range(3) for j in range(2)]
    predicted, truth = (
        np.asarray(nib.load(file).dataobj)
        for file in (written[0], folder / "derivatives/manual/sub-0/ses-0/anat/sub-0_ses-0_dseg.nii.gz")
    )
    assert np.array_equal(predicted, truth)


class Threshold(nn.Module):
    """A network that finds the boxes by their intensity."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(100.0))

    def forward(self, image: torch.Tensor) -> list[torch.Tensor]:
        front, back = image - 1.0, 4.0 * (image - 2.6)
        return [self.scale * torch.cat([torch.zeros_like(image), front, back], dim=1)]


def store(root: Path) -> dict[str, np.ndarray]:
    """Write one image as it is, turned, with flipped axes and with anisotropic voxels; return the affines."""
    angle = np.deg2rad(20)
    turned = np.eye(4)
    turned[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    turned[:3, 3] = [-30.5, 12.0, 7.0]
    flipped = np.diag([-1.0, 1.0, -1.0, 1.0])
    flipped[:3, 3] = [15.0, -3.0, 11.0]
    affines = {"plain": np.eye(4), "turned": turned, "flipped": flipped, "thick": np.diag([1.0, 1.0, 2.0, 1.0])}
    for name, affine in affines.items():
        write_case(root, name, 5, affine)
    return affines


def test_predictions_lie_where_the_images_do(federation: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    _, plan = federation
    affines = store(tmp_path / "new")
    written = list(
        Nnunet({"plan": plan}).write_predictions(Threshold(), SiteData("new", tmp_path / "new"), tmp_path / "out")
    )
    assert [file.name for file in written] == [f"{name}.nii.gz" for name in sorted(affines)]
    for name, affine in affines.items():
        predicted, truth = (
            nib.load(folder / f"{name}.nii.gz") for folder in (tmp_path / "out", tmp_path / "new" / "labelsTr")
        )
        np.testing.assert_allclose(predicted.affine, affine, atol=1e-5)
        equal = np.asarray(predicted.dataobj) == np.asarray(truth.dataobj)
        # Thick slices were resampled to the plan's voxels and back.
        assert equal.mean() >= (0.97 if name == "thick" else 1.0), name


def test_images_of_other_channels_are_not_predicted(federation: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    image = write_case(tmp_path, "a", 1)
    image.with_name("a_0001.nii.gz").write_bytes(image.read_bytes())
    with pytest.raises(DataError, match=r"a: 2 images; dataset\.json names 1 channels"):
        list(
            Nnunet({"plan": federation[1]}).write_predictions(Threshold(), SiteData("new", tmp_path), tmp_path / "out")
        )


def build_varied_network(task: Nnunet) -> nn.Module:
    """Return a random network that predicts every class: without biases, one of them would be everywhere."""
    torch.manual_seed(0)
    network = task.model().eval()
    with torch.no_grad():
        logits = network(torch.randn(1, 1, 16, 16, 16))[0]
        network.decoder.seg_layers[-1].bias -= logits.mean((0, 2, 3, 4))
    return network


def test_nnunet_predicts_the_same_from_the_saved_folder(
    federation: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, plan = federation
    affines, task = store(tmp_path / "new"), Nnunet({"plan": plan})
    network = build_varied_network(task)
    task.save(network, tmp_path / "results" / "Dataset001_Boxes" / "nnUNetTrainer__nnUNetPlans__3d_fullres")
    # As many as nnU-Net's command uses: the last bits depend on it.
    with limit_threads(os.cpu_count() or 1):
        new = SiteData("new", tmp_path / "new" / "imagesTr")
        assert len(list(task.write_predictions(network, new, tmp_path / "ours"))) == 4

    command = [Path(sys.executable).parent / "nnUNetv2_predict", "-d", "Dataset001_Boxes", "-c", "3d_fullres"]
    command += ["-f", "all", "-device", "cpu", "-npp", "0", "-nps", "0"]
    command += ["-i", str(tmp_path / "new" / "imagesTr"), "-o", str(tmp_path / "theirs")]
    places = {f"nnUNet_{kind}": str(tmp_path / kind) for kind in ("raw", "preprocessed", "results")}
    (tmp_path / "theirs").mkdir()
    done = subprocess.run(
        command, env={**os.environ, **places}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr

    for name in affines:
        ours, theirs = (nib.load(tmp_path / folder / f"{name}.nii.gz") for folder in ("ours", "theirs"))
        assert np.array_equal(ours.affine, theirs.affine)
        assert np.array_equal(np.asarray(ours.dataobj), np.asarray(theirs.dataobj)), name
        assert np.unique(np.asarray(ours.dataobj)).tolist() == [0, 1, 2]
    for file in ("plans.json", "dataset.json"):
        assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads(
            (tmp_path / "theirs" / file).read_text()
        )
