"""Brain tasks: from a BIDS data set to examples, with targets in the right unit and unusable subjects listed."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.data import Dataset

from flare_sparse.config.assemble import build_initial_model
from flare_sparse.core.errors import DataError
from flare_sparse.core.exchange import Patch, Request
from flare_sparse.inputs.scaling import STATISTICS, build_statistics_mask
from flare_sparse.methods.method import MethodConfig
from flare_sparse.methods.pooled_statistics import pool_statistics
from flare_sparse.methods.registry import METHODS
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import SiteData, Task
from flare_sparse.training import LocalTask, build_site
from flare_sparse.training.local_task import iterate_pass

SHAPE = (16, 20, 16)
SMALL = {"shape": SHAPE, "downsample": 1, "model": {"name": "brain_age_cnn_3mm", "channels": [2, 2, 2], "reduced": 2}}


def task(name: str = "brain_age", /, **settings: Any) -> Task:
    kind = TASKS[name]
    return kind(kind.Config.model_validate({**SMALL, **settings}))


def list_ages(examples: Dataset[Any]) -> list[float]:
    """Return the targets of all examples; indexing, because a PyTorch data set need not be iterable."""
    return [examples[i][1].item() for i in range(len(examples))]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def brains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_phantoms(tmp_path_factory.mktemp("brains") / "p", sites=2, subjects=5, seed=0, shape=SHAPE)


@pytest.fixture
def damaged(brains: Path, tmp_path: Path) -> Path:
    """Ten subjects, five of them unusable in five ways, and a folder without a row."""
    path = Path(shutil.copytree(brains, tmp_path / "damaged"))
    file = {n: path / f"sub-0100{n}" / "anat" / f"sub-0100{n}_T1w.nii.gz" for n in range(1, 6)}
    file[1].write_bytes(file[1].read_bytes()[:-20])
    nib.save(nib.Nifti1Image(np.full(SHAPE, np.nan, np.float32), np.eye(4)), file[2])
    nib.save(nib.Nifti1Image(np.ones((3, 4, 5), np.uint8), np.eye(4)), file[3])
    file[4].unlink()
    (path / "sub-99").mkdir()
    table = path / "participants.tsv"
    rows = table.read_text().splitlines()
    fields = rows[5].split("\t")
    rows[5] = "\t".join([fields[0], "n/a", *fields[2:]])
    table.write_text("\n".join(rows) + "\n")
    return path


def test_loaded_examples_are_normalised_and_split(brains: Path) -> None:
    examples = task().load(SiteData("site-1", brains), seed=0)
    assert (examples.n_train, examples.n_test, examples.skipped) == (8, 2, 0)
    volume, age = examples.train[0]
    assert (volume.shape, age.shape) == ((1, *SHAPE), (1,))
    assert (volume.dtype, age.dtype) == (torch.float32, torch.float32)
    assert abs(volume.mean().item()) < 1e-5
    assert 20 <= age.item() <= 80


def test_volumes_are_augmented_and_ages_stay(brains: Path) -> None:
    augmented = task(normalization="brain", augmentation={"mirror": True, "intensity": 0.1})
    examples = augmented.load(SiteData("site-1", brains), seed=0)
    batch = next(iterate_pass(examples.train, 8, torch.Generator().manual_seed(0), joins_last=False))
    volumes, ages = augmented.augment(batch, torch.Generator().manual_seed(0))
    assert volumes.shape == batch[0].shape
    assert torch.equal(ages, batch[1])
    differs = [not torch.equal(a, b) for a, b in zip(volumes, batch[0], strict=True)]
    assert all(differs)
    plain = task()
    assert plain.augment(batch, torch.Generator())[0] is batch[0]


def test_subset_selects_a_sites_subjects(brains: Path) -> None:
    examples = task().load(SiteData("a", brains, ("sub-01001", "sub-02003", "sub-01002")), seed=0)
    assert (examples.n_train, examples.n_test) == (2, 1)


def test_site_sends_the_statistics_of_its_training_voxels(brains: Path) -> None:
    voxels = task(model={"name": "voxel_mlp", "hidden": [2]}, normalization="brain_first", downsample=4)
    layout, _ = build_initial_model(voxels, seed=0)
    examples = voxels.load(SiteData("site-1", brains), seed=0)
    site = build_site(LocalTask.open("site-1", voxels, examples, layout, seed=0))
    method = pool_statistics(METHODS["fedavg"](MethodConfig(), layout))
    request = Request(STATISTICS, 0, Patch.empty(layout.size), build_statistics_mask(layout))
    sent = layout.unflatten(method.answer(request, site).patch.to_vector())["2.statistics"]
    volumes = torch.stack([examples.train[i][0] for i in range(8)])
    # 4x5x4 voxels, of which the two halves are averaged.
    halves = ((volumes + volumes.flip(2)) / 2)[:, 0, :2].flatten(1).double()
    assert sent.shape == (5, 2 * 5 * 4)
    assert sent[0].tolist() == [8.0] * 40
    torch.testing.assert_close(sent[1].double(), halves.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sent[3].double(), halves.std(0, correction=0), rtol=1e-6, atol=1e-6)


def test_every_kind_of_unusable_subject_is_listed_by_id(damaged: Path) -> None:
    with pytest.raises(DataError) as caught:
        task().load(SiteData("site-1", damaged), seed=0)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{damaged}: 6 of 11 subjects cannot be used:"
    assert [line.strip().split(":")[0] for line in lines[1:-1]] == [f"sub-0100{n}" for n in range(1, 6)] + ["sub-99"]
    expected = (
        "corrupt file",
        "voxels of",
        "wrong shape 3x4x5",
        "missing file",
        "age is missing",
        "unknown participant",
    )
    assert all(what in line for what, line in zip(expected, lines[1:-1], strict=True))
    assert lines[-1] == "Repair or remove them, or set task.skip_bad_subjects: true."


def test_unusable_subjects_are_skipped_and_counted_on_request(damaged: Path) -> None:
    examples = task(skip_bad_subjects=True).load(SiteData("site-1", damaged), seed=0)
    assert (examples.n_train, examples.n_test, examples.skipped) == (4, 1, 6)
    assert len(examples.warnings) == 1
    assert examples.warnings[0].startswith("6 examples are skipped, since they cannot be used: sub-01001: corrupt file")
    assert examples.warnings[0].endswith(" and 3 more")
    # The subjects of a simulated site are chosen from the rows.
    rows = task().cohort(damaged).ids
    listed = task(skip_bad_subjects=True).load(SiteData("a", damaged, rows), seed=0)
    assert listed.warnings[1:] == ("1 folders have no row in participants.tsv: sub-99",)


def test_subject_without_age_is_usable_for_sex(damaged: Path) -> None:
    examples = task("sex_classification").load(SiteData("a", damaged, ("sub-01005", "sub-02001")), seed=0)
    assert sorted(examples.train[0][1].tolist() + examples.test[0][1].tolist()) == [0.0, 0.0]


def test_unknown_participant_in_subset_is_explained(brains: Path) -> None:
    with pytest.raises(DataError, match="sub-77: there is no such case"):
        task().load(SiteData("a", brains, ("sub-01001", "sub-77")), seed=0)


def test_examples_are_equal_with_and_without_cache(brains: Path) -> None:
    kept, read = (task(cache=cache).load(SiteData("a", brains), seed=3) for cache in (True, False))
    assert kept.n_train == read.n_train == 8
    for i in range(8):
        assert all(torch.equal(a, b) for a, b in zip(kept.train[i], read.train[i], strict=True))


def test_split_depends_on_the_seed(brains: Path) -> None:
    ages = [list_ages(task().load(SiteData("a", brains), seed).test) for seed in (0, 0, 1)]
    assert ages[0] == ages[1] != ages[2]


def test_loss_of_age_is_standardised_and_predictions_are_in_years() -> None:
    config = {"age_mean": 50.0, "age_scale": 10.0}
    constant = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(constant.weight)
    torch.nn.init.constant_(constant.bias, 0.5)
    batch = (torch.zeros(2, 1), torch.tensor([[60.0], [80.0]]))
    assert task(**config).loss(constant, batch).item() == pytest.approx((0.5 * 0.5**2 + (2.5 - 0.5)) / 2)
    assert task(**config, loss="mse").loss(constant, batch).item() == pytest.approx((0.5**2 + 2.5**2) / 2)
    predictions, targets = task(**config).predict(constant, batch)
    assert predictions.flatten().tolist() == [55.0, 55.0]
    assert task().metrics(predictions, targets) == {"mae": 15.0, "rmse": 325**0.5, "bias": -15.0}


@pytest.mark.parametrize("name", ["brain_age", "sex_classification"])
def test_training_steps_lower_the_loss(brains: Path, name: str) -> None:
    learn = task(name)
    examples = learn.load(SiteData("a", brains), seed=0)
    model = learn.model()
    batch = next(iterate_pass(examples.train, 8, torch.Generator().manual_seed(0), joins_last=False))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = learn.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert learn.metric.name in learn.evaluate(model, examples.test)


def test_fedsparsify_network_has_the_papers_size() -> None:
    paper = task(model={"name": "brain_age_cnn"}, shape=(91, 109, 91))
    assert sum(p.numel() for p in paper.model().parameters()) == 2_950_401


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model": {"name": "mlp"}},
            "model 'mlp' takes features, but this task provides volume; choose one of: brain_age_cnn",
        ),
        ({"downsample": 17}, "less than or equal to 16"),
        ({"shape": (2, 20, 20), "downsample": 4}, "downsample 4 is larger than a side of shape"),
        ({"age_scale": 0}, "greater than 0"),
        ({"colour": 1}, "Extra inputs"),
    ],
)
def test_unusable_settings_are_explained(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task(**settings)


def test_file_that_is_not_gzip_is_explained(brains: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(brains, tmp_path / "p"))
    (path / "sub-01001" / "anat" / "sub-01001_T1w.nii.gz").write_bytes(gzip.compress(b"x"))
    with pytest.raises(DataError, match="sub-01001: corrupt file"):
        task().load(SiteData("a", path), seed=0)


@pytest.mark.slow
def test_all_real_brains_are_usable(shared_data: Path) -> None:
    """Every volume of two hospitals is usable, and the network accepts them."""
    kind = TASKS["brain_age"]
    real = kind(kind.Config())
    path = shared_data / "brain_t1"
    cohort = real.cohort(path)
    nsk = tuple(name for name in cohort.ids if name.startswith("NSK/"))
    examples = real.load(SiteData("NSK", path, nsk), seed=0)
    assert (examples.n_train, examples.n_test, examples.skipped) == (58, 14, 0)
    ages_in_years = list_ages(examples.train) + list_ages(examples.test)
    assert (min(ages_in_years), max(ages_in_years)) == (19.0, 55.0)
    assert real.evaluate(real.model(), examples.test)["mae"] > 0


def test_images_of_a_derivative_are_read_with_the_rows_of_the_data_set(brains: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(brains, tmp_path / "bids"))
    (path / "derivatives" / "prep").mkdir(parents=True)
    for folder in path.glob("sub-0*/"):
        shutil.move(folder, path / "derivatives" / "prep" / folder.name)
    with pytest.raises(DataError, match=r"derivatives/prep has one: set task\.derivative"):
        task().load(SiteData("a", path), seed=0)
    derived = task(derivative="pr*").load(SiteData("a", path), seed=0)
    whole = task().load(SiteData("a", brains), seed=0)
    assert derived.train_ids == whole.train_ids
    assert all(torch.equal(derived.train[i][0], whole.train[i][0]) for i in range(derived.n_train))
    assert task(derivative="prep").cohort(path).ids == task().cohort(brains).ids
    with pytest.raises(DataError, match=r"0 folders derivatives/other in .*; expected 1, found prep"):
        task(derivative="other").load(SiteData("a", path), seed=0)
    with pytest.raises(ValidationError):
        task(derivative="../prep")
