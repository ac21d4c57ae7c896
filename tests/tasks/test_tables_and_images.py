"""Tasks on tables and images: scaling, checks, and learning from real data."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from flare_sparse.config.bundles import insert_bundle
from flare_sparse.core.errors import DataError
from flare_sparse.tasks.classes import compute_binary_metrics, compute_cross_entropy, compute_risk_metrics
from flare_sparse.tasks.data.features import ATLASES, encode_features, scale_anatomically
from flare_sparse.tasks.data.tables import Table
from flare_sparse.tasks.registry import TASKS
from flare_sparse.tasks.task import SiteData, Task
from flare_sparse.training.local_task import iterate_pass

BUNDLE = Path(__file__).parents[2] / "app_configs/unet_bundle"


def task(name: str, **settings: object) -> Task:
    kind = TASKS[name]
    return kind(kind.Config.model_validate(settings))


def train_and_evaluate(learn: Task, data: SiteData, epochs: int, batch_size: int = 16) -> dict[str, float]:
    """Train with Adam and return the metrics on the site's test examples."""
    examples = learn.load(data, seed=0)
    torch.manual_seed(0)
    model, order = learn.model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in iterate_pass(examples.train, batch_size, order, joins_last=False):
            optimizer.zero_grad()
            learn.loss(model, batch).backward()
            optimizer.step()
    return learn.evaluate(model, examples.test)


def test_features_are_scaled_by_constants() -> None:
    columns = {"a_thickness": [2.5, 3.0], "ICV": [1.5e6, 1.7e6], "Left-Hippocampus": [1.5e3 * np.e, 0.0]}
    table = Table(Path("t"), {name: np.array(values) for name, values in columns.items()})
    expected = [[0.0, 0.0, 0.0], [1.0, 1.0, (np.log(1 / 1700) - 1) / 2]]
    found = scale_anatomically(encode_features(table, list(columns), {}, has_indicators=False)).values
    np.testing.assert_allclose(found, expected, atol=1e-12)
    empty = Table(Path("t"), {"ICV": np.array([0.0]), "Left-Hippocampus": np.array([1.0])})
    with pytest.raises(DataError, match=r"column 'ICV' is 0 \(row 1\)"):
        scale_anatomically(encode_features(empty, list(empty.columns), {}, has_indicators=False))


@pytest.mark.slow
def test_age_is_learned_from_morphometry(shared_data: Path) -> None:
    """The error is below half of the mean predictor's 10.2 years (1,078 pooled subjects of 23 sites)."""
    path = shared_data / "brain_morphometry" / "destrieux_fcon1000.csv.gz"
    learn = task(
        "table", kind="regression", target="age", target_scale=(45, 15), features=("destrieux",), scaling="freesurfer"
    )
    ages = torch.cat([age for _, age in learn.load(SiteData("all", path), seed=0).test])  # type: ignore[attr-defined]
    error_of_mean = (ages - ages.mean()).abs().mean().item()
    assert error_of_mean > 9
    assert train_and_evaluate(learn, SiteData("all", path), epochs=10)["mae"] < 0.5 * error_of_mean


def test_atlases_have_the_columns_of_freesurfer() -> None:
    """The digests are those of the sorted columns of public tables."""
    digests = {name: sha256("\n".join(columns).encode()).hexdigest()[:16] for name, columns in ATLASES.items()}
    assert digests == {"destrieux": "371e3d3a31204872", "desikan": "c9cb0f7de658393e"}
    assert {name: len(columns) for name, columns in ATLASES.items()} == {"destrieux": 193, "desikan": 71}


@pytest.mark.long
def test_pneumonia_is_learned_from_xrays(shared_data: Path) -> None:
    path = shared_data / "pneumoniamnist" / "pneumoniamnist.npz"
    figures = train_and_evaluate(
        task("image_classification", images_per_split=500), SiteData("all", path), epochs=2, batch_size=32
    )
    assert figures["auc"] > 0.85
    assert set(figures) == {"accuracy", "f1", "auc"}


@pytest.mark.slow
def test_digits_are_learned_from_mnist(shared_data: Path) -> None:
    path = shared_data / "mnist" / "mnist_small.npz"
    figures = train_and_evaluate(
        task("image_classification", classes=10, images_per_split=800), SiteData("all", path), epochs=2
    )
    assert list(figures) == ["accuracy"]
    assert figures["accuracy"] > 0.3


def test_resnet_takes_colour_images(shared_data: Path) -> None:
    learn = task("image_classification", classes=10, image=(3, 32, 32), model={"name": "resnet32"})
    ids = tuple(f"train/{i}" for i in range(10))
    examples = learn.load(SiteData("a", shared_data / "cifar10" / "cifar10_jpeg.npz", ids), seed=0)
    assert (examples.n_train, examples.n_test) == (8, 2)
    batch = next(iterate_pass(examples.train, 4, torch.Generator(), joins_last=False))
    assert learn.predict(learn.model(), batch)[0].shape == (4, 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image": (1, 32, 32)}, "images are (4, 3, 1) (height, width, channels); expected (32, 32, 1)"),
        ({"image": (1, 4, 3), "classes": 4}, "labels range from 0 to 4; expected 0 to 3"),
    ],
)
def test_images_that_contradict_settings_are_refused(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    np.savez(tmp_path / "a.npz", train_images=np.zeros((5, 4, 3), np.uint8), train_labels=np.arange(5))
    with pytest.raises(DataError) as caught:
        task("image_classification", **settings).load(SiteData("a", tmp_path / "a.npz"), seed=0)
    assert message in str(caught.value)


def test_pixels_are_scaled_to_minus_one_to_one() -> None:
    learn = task("image_classification")
    seen: list[torch.Tensor] = []

    class Watch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return torch.zeros(len(x), 2)

    images = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1)
    assert learn.loss(Watch(), (images, torch.tensor([0, 1]))).item() == pytest.approx(np.log(2))
    assert seen[0].flatten().tolist() == [-1.0, 1.0]


def test_binary_metrics_match_hand_computation() -> None:
    """One true positive, one false positive, one false negative, one true negative; 3 of 4 pairs in order."""
    figures = compute_binary_metrics(torch.tensor([0.9, 0.6, 0.4, 0.1]), torch.tensor([1.0, 0.0, 1.0, 0.0]))
    assert figures == {"accuracy": 0.5, "f1": 0.5, "auc": 0.75}


def test_metrics_undefined_for_one_class_are_omitted() -> None:
    assert compute_binary_metrics(torch.tensor([0.1, 0.2]), torch.zeros(2)) == {"accuracy": 1.0}
    assert compute_binary_metrics(torch.tensor([0.9, 0.2]), torch.zeros(2)) == {"accuracy": 0.5, "f1": 0.0}
    assert compute_binary_metrics(torch.tensor([0.9]), torch.ones(1)) == {"accuracy": 1.0, "f1": 1.0}


def test_risk_metrics_match_hand_computation() -> None:
    risk, died = torch.tensor([0.95, 0.65, 0.35, 0.05]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    figures = compute_risk_metrics(risk, died)
    assert figures["auc"] == pytest.approx(0.75)
    assert figures["auc_pr"] == pytest.approx((1 + 2 / 3) / 2)
    assert figures["brier"] == pytest.approx((0.05**2 + 0.65**2 + 0.65**2 + 0.05**2) / 4)
    assert figures["calibration_error"] == pytest.approx((0.05 + 0.65 + 0.65 + 0.05) / 4)
    assert set(compute_risk_metrics(risk, torch.zeros(4))) == {"accuracy", "f1", "brier", "calibration_error"}


def test_calibration_error_is_zero_for_calibrated_risk_and_its_excess_otherwise() -> None:
    died = torch.tensor([1.0] + [0.0] * 9)
    assert compute_risk_metrics(torch.full((10,), 0.1), died)["calibration_error"] == pytest.approx(0, abs=1e-7)
    assert compute_risk_metrics(torch.full((10,), 0.5), died)["calibration_error"] == pytest.approx(0.4)


def test_every_task_works_with_its_defaults() -> None:
    required = {
        "table": {"kind": "binary", "target": "y", "features": ["x"]},
        "segmentation": {"classes": {"tumour": 1, "oedema": [2, 4]}},
        "bundle": {"declaration": insert_bundle({"task": {"bundle": str(BUNDLE)}})["task"]["declaration"]},
    }
    # A plan of nnU-Net has no example without nnU-Net: tests/tasks/nnunet.
    for name, kind in [(name, kind) for name, kind in TASKS.items() if name != "nnunet"]:
        learn = kind(kind.Config.model_validate(required.get(name, {})))
        assert sum(p.numel() for p in learn.model().parameters()) > 0
        assert kind.Config.model_validate(learn.config.model_dump(mode="json")) == learn.config
        assert [field for field, info in kind.Config.model_fields.items() if not info.description] == []


@pytest.mark.parametrize("name", ["image_classification", "text_classification"])
def test_class_weights_need_one_number_for_each_class(name: str) -> None:
    config = TASKS[name].Config
    config.model_validate({"classes": 2, "class_weights": [1, 4]})
    with pytest.raises(ValidationError, match="class_weights has 3 numbers for 2 classes; give one for each"):
        config.model_validate({"classes": 2, "class_weights": [1, 4, 2]})


def test_class_weights_are_those_of_the_examples_in_the_mean() -> None:
    logits = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    errors = [float(torch.log(torch.tensor(2.0))), float(torch.log1p(torch.exp(torch.tensor(2.0))))]
    loss = compute_cross_entropy(logits, torch.tensor([0, 1]), (1.0, 4.0))
    assert float(loss) == pytest.approx((errors[0] + 4 * errors[1]) / 5)
    assert float(compute_cross_entropy(logits, torch.tensor([0, 1]))) == pytest.approx(sum(errors) / 2)


def test_images_are_classified_with_the_weights_of_the_settings() -> None:
    settings = {"image": [1, 8, 8], "model": {"name": "image_cnn", "channels": [2, 2]}}
    plain, weighted = (
        TASKS["image_classification"](TASKS["image_classification"].Config.model_validate({**settings, **more}))
        for more in ({}, {"class_weights": [1, 9]})
    )
    torch.manual_seed(0)
    network = plain.model()
    images, labels = torch.randint(0, 255, (4, 1, 8, 8), dtype=torch.uint8), torch.tensor([0, 0, 1, 1])
    assert weighted.loss(network, (images, labels)).item() != plain.loss(network, (images, labels)).item()
    ones = (images[:2], labels[:2])
    assert weighted.loss(network, ones).item() == pytest.approx(plain.loss(network, ones).item())


def test_augmented_images_are_scaled_once_and_mirrored_from_left_to_right() -> None:
    settings = {"image": [1, 8, 8], "model": {"name": "image_cnn", "channels": [2, 2]}}
    kind = TASKS["image_classification"]
    plain, mirroring = (
        kind(kind.Config.model_validate({**settings, **more})) for more in ({}, {"augmentation": {"mirror": True}})
    )
    torch.manual_seed(0)
    images, labels = torch.randint(0, 255, (16, 1, 8, 8), dtype=torch.uint8), torch.arange(16) % 2
    assert plain.augment((images, labels), torch.Generator())[0] is images
    changed, same_labels = mirroring.augment((images, labels), torch.Generator().manual_seed(0))
    scaled = images.float() / 127.5 - 1
    is_mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(changed, scaled, strict=True)]
    is_unchanged = [torch.equal(a, b) for a, b in zip(changed, scaled, strict=True)]
    assert 0 < sum(is_mirrored) < 16 == sum(is_mirrored) + sum(is_unchanged)
    assert torch.equal(same_labels, labels)
    network = plain.model()
    assert plain.loss(network, (scaled, labels)).item() == plain.loss(network, (images, labels)).item()
