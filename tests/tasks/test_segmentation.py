"""Segmentation: volumes of different shapes, patches for training, whole volumes for evaluation, metrics by class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from skips import require
from torch import Tensor, nn

from flare_sparse.core.errors import DataError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.tasks.segmentation import Segmentation, measure_case
from flare_sparse.tasks.task import SiteData
from flare_sparse.training import LocalTask, TrainingConfig, build_site

SETTINGS: dict[str, Any] = {
    "classes": {"core": 1, "rim": [2, 3]},
    "model": {"name": "dyn_unet", "channels": [2, 2, 4]},
    "patch": (8, 8, 8),
    "overlap": 0.0,
}
SHAPES = [(9, 12, 8), (10, 8, 9), (6, 11, 12), (12, 12, 12), (8, 8, 8), (9, 9, 9)]


def build_task(**settings: Any) -> Segmentation:
    return Segmentation({**SETTINGS, **settings})


def write_case(folder: Path, name: str, shape: tuple[int, ...], spacing: float = 1.0) -> None:
    """Write a bright ball with a brighter core, and its labels 1 (core) and 2 (rim)."""
    grid = np.stack(np.meshgrid(*[np.arange(side) - side / 2 for side in shape], indexing="ij"))
    radius = np.sqrt((grid**2).sum(0))
    labels = np.select([radius < 2, radius < 3.5], [1, 2], 0).astype(np.uint8)
    affine = np.diag([spacing, spacing, spacing, 1])
    for values, file in (
        (labels * 10.0 + grid[0], folder / name / "anat" / f"{name}_T1w.nii.gz"),
        (labels, folder / "derivatives" / "hand" / name / "anat" / f"{name}_dseg.nii.gz"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(values.astype(np.float32), affine), file)


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balls")
    for number, shape in enumerate(SHAPES, start=1):
        write_case(folder, f"sub-{number}", shape)
    return folder


class Oracle(nn.Module):
    """Returns logits that agree with the intensities of :func:`write_case`."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x), (x - 15) * -1 + 5, x - 15], dim=1)


class Threshold(nn.Module):
    """Returns logits of background and one class, which is brighter than 7.5."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([7.5 - x, x - 7.5], dim=1)


def test_cases_of_all_shapes_are_split_and_batched(balls: Path) -> None:
    task = build_task(split={"validation": 0.2})
    examples = task.load(SiteData("a", balls), seed=0)
    assert (examples.n_train, examples.n_validation, examples.n_test) == (4, 1, 1)
    images, labels, spacings = task.collate([examples.train[0], examples.train[1]])
    assert [image.shape[1:] for image in images] == [label.shape for label in labels]
    assert spacings.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_sessions_of_a_subject_are_in_the_same_part_of_the_split(tmp_path: Path) -> None:
    for subject in range(1, 6):
        for session in "ab":
            for folder, suffix in (("", "T1w"), ("derivatives/hand/", "dseg")):
                anat = tmp_path / f"{folder}sub-{subject}/ses-{session}/anat"
                anat.mkdir(parents=True)
                values = np.random.default_rng(0).integers(0, 3, (8, 8, 8)).astype(np.uint8)
                nib.save(nib.Nifti1Image(values, np.eye(4)), anat / f"sub-{subject}_ses-{session}_{suffix}.nii.gz")
    examples = build_task().load(SiteData("a", tmp_path), seed=0)
    assert (examples.n_train, examples.n_test) == (8, 2)
    assert len({name.split("_")[0] for name in examples.test_ids}) == 1


def test_training_minibatch_is_patches_and_repeats_with_its_generator(balls: Path) -> None:
    task = build_task(augmentation={"mirror": True, "shift": 2})
    examples = task.load(SiteData("a", balls), seed=0)
    batch = task.collate([examples.train[i] for i in range(3)])
    first, second = (task.augment(batch, torch.Generator().manual_seed(4)) for _ in range(2))
    assert [tuple(part.shape) for part in first] == [(3, 1, 8, 8, 8), (3, 8, 8, 8), (3, 3)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Where an image was moved, its labels were moved with it: the classes keep their intensities.
    images, labels = first[0][:, 0], first[1]
    assert images[labels == 1].mean() < images[labels == 2].mean()


def test_loss_of_whole_volumes_is_that_of_their_central_patches(tmp_path: Path) -> None:
    for number, shape in enumerate([(12, 12, 12), (10, 8, 12), (8, 14, 10)], start=1):
        write_case(tmp_path, f"sub-{number}", shape)
    task = build_task()
    examples = task.load(SiteData("a", tmp_path), seed=0)
    model, whole = task.model(), [examples.train[i] for i in range(2)]
    cut = []
    for image, label, spacing in whole:
        window = tuple(slice((side - 8) // 2, (side + 8) // 2) for side in label.shape)
        cut.append((image[(slice(None), *window)], label[window], spacing))
    assert task.loss(model, task.collate(whole)).item() == pytest.approx(task.loss(model, task.collate(cut)).item())


def test_loss_is_dice_of_the_classes_plus_cross_entropy() -> None:
    task = build_task()
    labels = torch.randint(0, 3, (2, 8, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    logits = torch.randn(2, 3, 8, 8, 8, generator=torch.Generator().manual_seed(1))

    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return logits

    p, y = logits.softmax(1)[:, 1:], nn.functional.one_hot(labels.long(), 3).permute(0, 4, 1, 2, 3)[:, 1:]
    dice = 1 - (2 * (p * y).sum((2, 3, 4)) / (p.sum((2, 3, 4)) + y.sum((2, 3, 4)))).mean()
    expected = dice + nn.functional.cross_entropy(logits, labels.long())
    loss = task.loss(Constant(), (torch.zeros(2, 1, 8, 8, 8), labels, torch.ones(2, 3)))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_metrics_are_means_over_whole_cases_by_class(balls: Path) -> None:
    task = build_task(normalization="none")
    examples = task.load(SiteData("a", balls), seed=0)
    metrics = task.evaluate(Oracle(), examples.train)
    rows = []
    for image, label, _ in (examples.train[i] for i in range(examples.n_train)):
        predicted = Oracle()(image[None])[0].argmax(0).to(torch.uint8)
        rows.append(measure_case(predicted, label, 2, (1, 1, 1), hd95=True))
    names = ["dice", "dice_core", "dice_rim", "hd95", "hd95_core", "hd95_rim"]
    assert list(metrics) == names
    assert list(metrics.values()) == pytest.approx(torch.stack(rows).mean(0).tolist())
    assert 0.5 < metrics["dice"] < 1


def test_prediction_and_metrics_are_on_the_grid_of_the_image(tmp_path: Path) -> None:
    for number in (1, 2):
        write_case(tmp_path, f"sub-{number}", (12, 16, 12), spacing=0.5)
    task = build_task(classes={"ball": [1, 2]}, normalization="none", spacing=(1.0, 1.0, 1.0))
    examples = task.load(SiteData("a", tmp_path), seed=0)
    image, labels, spacing = examples.test[0]
    assert (image.shape, labels.shape, spacing.tolist()) == ((1, 6, 8, 6), (12, 16, 12), [0.5, 0.5, 0.5])
    predicted, truth = task.predict(Threshold(), task.collate([examples.test[0]]))
    assert predicted.shape == truth.shape == (1, 12, 16, 12)
    metrics = task.evaluate(Threshold(), examples.test)
    assert metrics["dice"] > 0.75
    assert metrics["hd95"] <= 1.0


def test_site_of_one_shape_trains_and_evaluates_like_any_other(tmp_path: Path) -> None:
    path = write_phantoms(tmp_path / "p", 1, 4, 0, (16, 20, 16), labels=True)
    task = Segmentation({**SETTINGS, "classes": {"grey": 1, "white": 2, "ventricles": 3}})
    site = build_site(
        LocalTask.open(
            "site-1", task, task.load(SiteData("site-1", path), 0), layout := Layout.from_module(task.model()), 0
        )
    )
    start = layout.flatten(dict(task.model().named_parameters()))
    config = TrainingConfig(batch_size=2, lr=1e-2)
    trained = site.train(start, Mask.full(layout.size), config, 1)
    assert not torch.equal(trained, start)
    assert site.trainer.usage.examples == 3
    metrics = site.evaluate(trained)
    assert metrics["test_examples"] == 1
    assert set(metrics) > {"dice_grey", "dice_white", "dice_ventricles", "hd95_ventricles"}


def test_unusable_cases_are_listed_or_skipped(tmp_path: Path) -> None:
    for number in range(1, 5):
        write_case(tmp_path, f"sub-{number}", (8, 8, 8))
    (tmp_path / "derivatives/hand/sub-2/anat/sub-2_dseg.nii.gz").unlink()
    with pytest.raises(DataError, match="sub-2: missing file: there is no label map"):
        build_task().load(SiteData("a", tmp_path), 0)
    with pytest.raises(DataError, match="sub-9: there is no such case"):
        build_task().load(SiteData("a", tmp_path, ("sub-1", "sub-9")), 0)
    examples = build_task(skip_bad_subjects=True).load(SiteData("a", tmp_path), 0)
    assert (examples.skipped, examples.n_train + examples.n_test) == (1, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes": {}}, "at least 1 item"),
        ({"classes": {"a": 1, "b": [1, 2]}}, "label 1 belongs to two classes"),
        ({"classes": {"a b": 1}}, "match pattern"),
        ({"window": (5, 5)}, r"window is \[5.0, 5.0\]; expected \[low, high\]"),
        ({"model": {"name": "brain_age_cnn"}}, "takes volume, but this task provides patch; choose one of: basic_unet"),
    ],
)
def test_invalid_settings_are_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        build_task(**settings)


def test_real_hippocampi_are_read_and_learnt(shared_data: Path) -> None:
    path = shared_data / "hippocampus"
    require(path.is_dir(), "the hippocampus cohort of ../shared/data is needed")
    task = build_task(classes={"anterior": 1, "posterior": 2}, patch=(40, 56, 40))
    cohort = task.cohort(path)
    assert len(cohort.ids) == 260
    assert {name: int((cohort.columns["site"] == name).sum()) for name in "ABC"} == {"A": 55, "B": 172, "C": 33}
    examples = task.load(SiteData("C", path, cohort.ids[:5]), 0)
    images, labels, _ = task.collate([examples.train[i] for i in range(4)])
    assert all(abs(float(image.mean())) < 1e-5 for image in images)
    assert all(label.unique().tolist() == [0, 1, 2] for label in labels)
