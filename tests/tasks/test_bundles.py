"""MONAI bundles: what a job declares, the allow list, and the task that trains what a bundle declares."""

from __future__ import annotations

import copy
import importlib
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.data import MetaTensor
from monai.losses import DiceCELoss
from monai.transforms import EnsureChannelFirstd, LoadImaged
from PIL import Image
from pydantic import ValidationError
from torch import nn

from flare_sparse.config.bundles import insert_bundle
from flare_sparse.core.errors import ConfigError, DataError, MetricsError
from flare_sparse.core.params import Layout
from flare_sparse.tasks.bundles.components import CLASSES
from flare_sparse.tasks.bundles.declaration import Declaration, read_declaration
from flare_sparse.tasks.bundles.targets import LabelMaps
from flare_sparse.tasks.bundles.task import BundleTask
from flare_sparse.tasks.data.bids import CaseFiles
from flare_sparse.tasks.data.phantom import write_phantoms
from flare_sparse.tasks.task import Examples, SiteData

PAGE = Path(__file__).parents[2] / "docs" / "bundles.md"
TRAIN: dict[str, Any] = json.loads(PAGE.read_text().partition("```json\n")[2].partition("```")[0])
SITE_PATCH = (16, 16, 16)
MIRRORED = np.array([[-1.0, 0, 0, 5], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
"""Affine of a volume ``(6, 6, 6)`` that is stored from right to left."""


def resolve(content: dict[str, Any], **training: Any) -> dict[str, Any]:
    """Return the settings that a configuration becomes at the lead: the sections ``task`` and ``method.training``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "configs").mkdir()
        (Path(folder) / "configs/train.json").write_text(json.dumps(content))
        return insert_bundle({"task": {"bundle": folder}, "method": {"training": training}})


def build(content: dict[str, Any], **settings: Any) -> BundleTask:
    return BundleTask({"declaration": resolve(content)["task"]["declaration"], **settings})


def declare(content: dict[str, Any]) -> Declaration:
    return read(resolve(content)["task"]["declaration"])


def read(parts: dict[str, Any]) -> Declaration:
    return read_declaration(parts, "job", {})


PARTS: dict[str, Any] = resolve(TRAIN)["task"]["declaration"]


def change(path: str, value: Any) -> dict[str, Any]:
    """Return the page's configuration with another value at an item."""
    content = copy.deepcopy(TRAIN)
    *parents, last = path.split("::")
    section = content
    for key in parents:
        section = section[int(key)] if isinstance(section, list) else section[key]
    section[int(last) if isinstance(section, list) else last] = value
    return content


@pytest.mark.parametrize(
    "text",
    [
        "$__import__('os').system('true')",
        "$import os",
        "$().__class__",
        "$2 ** 9",
        "@network",
        "%/etc/passwd.json",
        "%loss",
    ],
)
@pytest.mark.parametrize("path", ["network::channels", "loss::reduction", "preprocessing::1::keys", "inferer::mode"])
def test_site_refuses_an_expression_and_evaluates_nothing(text: str, path: str) -> None:
    """Python's own events show it: while a declaration is read, nothing is compiled to run, imported or opened."""
    parts = copy.deepcopy(PARTS)
    section = parts
    *parents, last = path.split("::")
    for key in parents:
        section = section[int(key)] if isinstance(section, list) else section[key]
    section[last] = [text]
    with (
        watch_events() as events,
        pytest.raises(ConfigError, match=rf"job: {path}::0: found .*; a site evaluates no expression"),
    ):
        read(parts)
    assert events == []


@contextmanager
def watch_events() -> Iterator[list[str]]:
    """Yield a list that receives what Python runs, imports, opens and starts while the block lasts."""
    events: list[str] = []
    AUDITED.append(events)
    try:
        yield events
    finally:
        AUDITED.clear()
        events[:] = [event for event in events if event in ("exec", "import", "open", "os.system", "subprocess.Popen")]


AUDITED: list[list[str]] = []
sys.addaudithook(lambda event, args: AUDITED[0].append(event) if AUDITED else None)
NAMES = ["_target_", "_mode_", "_requires_", "keys", "func", "reader"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["image", "$exit()", "@x", "%x", "os"]),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(NAMES), parts, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(["network", "loss", "preprocessing", "postprocessing", "inferer", "metric", "x"]), VALUES)
def test_declaration_of_a_hostile_server_runs_nothing(part: str, value: Any) -> None:
    with watch_events() as events, suppress(ConfigError):
        read({**PARTS, part: value})
    assert events == []


@pytest.mark.parametrize("kind", CLASSES)
def test_every_allowed_class_exists(kind: Any) -> None:
    for path in CLASSES[kind].values():
        module, _, name = path.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name)), path
        assert kind != "transform" or f"`{name}`" in PAGE.read_text()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"_target_": "os.system", "command": "true"}, "found 'os.system', which is neither on the list"),
        ({"_target_": "subprocess.Flipd"}, "found 'subprocess.Flipd'"),
        ({"_target_": "monai.transforms.Lambdad", "keys": "image", "func": "exit"}, "Lambdad"),
        ({"_target_": "SaveImaged", "keys": "image", "output_dir": "/"}, "SaveImaged"),
        ({"_target_": "LoadImaged", "keys": "image", "reader": "my.Reader"}, "reader: found 'my.Reader'"),
        ({"_target_": "LoadImaged", "keys": "image", "reader": "NumpyReader"}, "reader: found 'NumpyReader'"),
        ({"_target_": "CropForegroundd", "keys": "image", "select_fn": "exit"}, "a function cannot be given"),
        ({"_target_": "Flipd", "keys": {"_target_": "Flipd"}}, "takes no component here"),
        ({"_target_": "Flipd", "_mode_": "debug"}, "_mode_: Flipd has no such argument"),
        ({"_target_": "Flipd", "keys": {"_requires_": 1}}, "keys: found dict"),
        ({"_target_": "Flipd", "spatial_axis": 10**400}, "expected a number of at most 1,000,000"),
        ({"_target_": "Flipd", "spatial_axis": math.nan}, "expected a number of at most 1,000,000"),
        ({"_target_": 3}, "expected a transform with _target_"),
        ("Flipd", "expected a transform with _target_"),
    ],
)
def test_class_or_argument_outside_the_allow_list_is_refused(item: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=r"job: preprocessing::1") as error:
        read({**PARTS, "preprocessing": [PARTS["preprocessing"][0], item]})
    assert message in str(error.value)


def test_wrong_argument_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"train\.json: network_def::chanels: UNet has no such argument.*'channels'"):
        declare(change("network_def::chanels", [2]))
    network = declare(change("network_def::strides", [])).network
    with pytest.raises(ConfigError, match="job: network: UNet cannot be built: ValueError"):
        network.build()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("loss::_target_", "my.Loss", r"train\.json: loss::_target_: found 'my.Loss', which is neither on"),
        (
            "network_def",
            "$monai.networks.nets.UNETR(1, 4, (96, 96, 96))",
            "network_def: its value is of the class UNETR",
        ),
        ("network_def::out_channels", "$__import__('missing')", "network_def: MONAI cannot resolve it: ModuleNotFound"),
        ("train::trainer", {"_target_": "my.Trainer"}, "train::trainer: found 'my.Trainer'; expected SupervisedTra"),
        ("trainer", {"_target_": "SupervisedTrainer", "iteration_update": "@x"}, "trainer::iteration_update: the tra"),
        ("validate::key_metric", {}, "validate::key_metric: expected a section with one metric"),
        (
            "train::fixed::0::keys",
            ["scan"],
            "train::preprocessing: LoadImaged loads scan; expected the same files every",
        ),
        *(
            ("train::fixed::0::keys", keys, "::0::keys: expected image, label, or a list of such names")
            for keys in (5, None, [["image"]], {"image": 1})
        ),
        ("validate::key_metric", {"<b>": {"_target_": "MeanDice"}}, r"key_metric: found the name '<b>' of a metric"),
        ("validate::key_metric", {"m" * 65: {"_target_": "MeanDice"}}, "expected 1 to 64 printable characters"),
        (
            "train::preprocessing::transforms",
            "$@train::random + @train::fixed",
            "expected LoadImaged as the first transform",
        ),
        (
            "validate::postprocessing",
            None,
            "missing; add this item, from which the job reads the bundle's postprocessing",
        ),
        ("train::fixed::1::keys", "$lambda x: x", "train::preprocessing::1::keys: its value is of the class function"),
    ],
)
def test_error_names_file_and_item(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare(change(path, value))


@pytest.mark.parametrize(
    "change_purpose",
    [
        {
            "loss": {"_target_": "torch.nn.MSELoss"},
            "validate": {"key_metric": {"a": {"_target_": "MeanAbsoluteError"}}},
        },
        {"loss": "$monai.losses.PatchAdversarialLoss()"},
        {},
    ],
)
def test_bundle_for_another_purpose_hears_that_in_one_line(change_purpose: dict[str, Any]) -> None:
    content = {"network_def": {"_target_": "my.Net"}, **change_purpose}
    with pytest.raises(
        ConfigError, match=r"train\.json: this bundle neither segments nor classifies images: its loss is [^\n]*$"
    ):
        declare(content)


def test_layout_of_the_template_of_monais_zoo_is_that_of_the_page() -> None:
    """Its items stand at the top, and the name of each says what they are for."""
    train, validate = TRAIN["train"], TRAIN["validate"]
    content = {
        "both_keys": ["$monai.utils.CommonKeys.IMAGE", "$monai.utils.CommonKeys.LABEL"],
        "base": [{"_target_": "LoadImaged", "keys": "@both_keys", "reader": "ITKReader"}, *train["fixed"][1:]],
        "more": train["random"],
        "network_def": TRAIN["network_def"],
        "lossfn": TRAIN["loss"],
        "optimizer": {"_target_": "torch.optim.Adam", "params": "$@network.parameters()", "lr": 0.1, "eps": 1e-8},
        "train_dataset": {"transform": {"_target_": "Compose", "transforms": "$@base + @more"}},
        "all": {"_target_": "Compose", "transforms": "@base"},
        "val_dataset": {"transform": {"_target_": "Compose", "transforms": "%all"}},
        "train_dataloader": {"_target_": "ThreadDataLoader", "batch_size": "$len(@both_keys)"},
        "evaluator": {"postprocessing": validate["postprocessing"], "key_val_metric": validate["key_metric"]},
        "trainer": {"_target_": "SupervisedTrainer"},
    }  # fmt: skip
    found, settings = declare(content), resolve(content)["method"]["training"]
    expected = declare(TRAIN)
    for part in ("preprocessing", "evaluation_preprocessing", "postprocessing"):
        pairs = zip(getattr(found, part), getattr(expected, part), strict=True)
        assert [(a.path, a.args) for a, _ in pairs] == [(b.path, b.args) for b in getattr(expected, part)]
    assert (found.network.args, found.loss.args) == (expected.network.args, expected.loss.args)
    assert found.inferer.path == "monai.inferers.SimpleInferer"
    assert settings == {"batch_size": 2, "optimizer": "adam", "lr": 0.1}


def test_optimizer_and_batch_size_become_training_settings() -> None:
    def read(content: dict[str, Any], *settings: str) -> dict[str, Any]:
        given = {name: 0 for name in ("optimizer", "batch_size") if name not in settings}
        return {name: value for name, value in resolve(content, **given)["method"]["training"].items() if value}

    assert read(TRAIN, "optimizer", "batch_size") == {"batch_size": 2, "optimizer": "adamw", "lr": 0.01}
    assert read(TRAIN, "batch_size") == {"batch_size": 2}
    sgd = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.5, "params": "@p"}
    values = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    assert read(change("optimizer", sgd), "optimizer") == values
    novograd = {"_target_": "Novograd", "lr": 0.1, "amsgrad": True, "betas": [0.9, 0.98], "grad_averaging": False}
    values = {"optimizer": "novograd", "lr": 0.1, "amsgrad": True}
    assert read(change("optimizer", novograd), "optimizer") == values
    for optimizer, message in (
        ({"_target_": "Lion"}, "optimizer: found 'Lion'; .*method.training.optimizer"),
        ({"_target_": "Adam", "betas": [0.5, 0.9]}, "optimizer::betas: not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(change("optimizer", optimizer), "optimizer")


def test_key_metric_may_be_a_reference_to_a_section() -> None:
    content = {**change("validate::key_metric", "@metrics"), "metrics": TRAIN["validate"]["key_metric"]}
    declared, expected = (declare(part) for part in (content, TRAIN))
    assert (declared.metric.path, declared.metric_name) == (expected.metric.path, expected.metric_name)


@pytest.fixture(scope="module")
def brains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_phantoms(tmp_path_factory.mktemp("p") / "p", 1, 5, 0, (26, 32, 26), labels=True)


@pytest.fixture(scope="module")
def task() -> BundleTask:
    return build(TRAIN)


def test_site_refuses_configurations_that_need_code_or_are_too_large() -> None:
    for parts, message in (
        ({**PARTS, "loss": {"_target_": "DiceLoss", "reduction": "$exit()"}}, "evaluates no expression"),
        ({**PARTS, "loss": {"_target_": "DiceLoss", "weight": [0] * 200_000}}, "expected at most 400,000"),
        ({**PARTS, "more": {}}, "more: expected one of network, loss"),
        ({key: part for key, part in PARTS.items() if key != "network"}, "network: missing"),
        ({**PARTS, "network": {"_target_": "UNet", "channels": math.nan}}, "not JSON compliant"),
    ):
        with pytest.raises(ValidationError, match=message):
            BundleTask.Config.model_validate({"declaration": parts})


def test_patches_depend_on_the_generator_alone(task: BundleTask, brains: Path) -> None:
    examples = task.load(SiteData("a", brains), seed=0)
    batch = task.collate([examples.train[0], examples.train[1]])
    first, again, other = (task.augment(batch, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    # Two samples of each of the two cases.
    assert first[0].shape == (4, 1, *SITE_PATCH)
    assert first[1].shape == (4, 1, *SITE_PATCH)
    assert type(first[0]) is torch.Tensor
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


def test_loss_is_that_of_monai_on_the_patches(task: BundleTask, brains: Path) -> None:
    batch = task.collate([task.load(SiteData("a", brains), seed=0).train[0]])
    torch.manual_seed(0)
    model = task.model()
    images, labels = task.augment(batch, torch.Generator().manual_seed(3))
    expected = DiceCELoss(to_onehot_y=True, softmax=True)(model(images), labels)
    assert torch.equal(task.loss(model, (images, labels)), expected)
    # Whole cases, as scores have them: always the same patches.
    assert torch.equal(task.loss(model, batch), task.loss(model, batch))


class Threshold(nn.Module):
    """Returns logits of four classes by intensity."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([-(x - level).abs() for level in (-1.0, 0.0, 0.5, 1.0)], dim=1)


def test_metric_is_the_mean_dice_over_classes_and_cases(task: BundleTask, brains: Path) -> None:
    test = task.load(SiteData("a", brains), seed=0).test
    dice = []
    for index in range(len(test)):
        image, label = (np.asarray(test[index][key][0]) for key in ("image", "label"))
        guess = np.abs(image[None] - np.array([-1, 0, 0.5, 1])[:, None, None, None]).argmin(0)
        dice.append(np.mean([2 * ((guess == c) & (label == c)).sum() / ((guess == c).sum() + (label == c).sum())
                             for c in (1, 2, 3)]))  # fmt: skip
    assert task.evaluate(Threshold(), test)["val_mean_dice"] == pytest.approx(float(np.mean(dice)), abs=1e-6)


def test_undefined_metric_is_left_out(task: BundleTask) -> None:
    nan = torch.full((2, 1), torch.nan, dtype=torch.float64)
    assert task.metrics(nan, nan) == {}
    assert task.metrics(torch.tensor([[0.5], [torch.nan]]), nan) == {"val_mean_dice": 0.5}


def test_cases_are_read_again_without_a_cache(brains: Path, task: BundleTask) -> None:
    uncached = build(TRAIN, cache=False)
    cached, read = (t.load(SiteData("a", brains), seed=0) for t in (task, uncached))
    assert cached.train_ids == read.train_ids
    for part in ("train", "test"):
        first, second = (getattr(examples, part)[0]["image"] for examples in (cached, read))
        assert torch.equal(first, second)


def test_evaluation_has_transforms_of_its_own(brains: Path) -> None:
    resized = [*TRAIN["train"]["fixed"], {"_target_": "Resized", "keys": ["image", "label"], "spatial_size": [8, 8, 8]}]
    content = change("validate::preprocessing::transforms", resized)
    examples = build(content).load(SiteData("a", brains), seed=0)
    assert examples.test[0]["image"].shape == (1, 8, 8, 8)
    assert examples.train[0]["image"].shape == (1, 26, 32, 26)


def test_failing_transform_is_named_with_the_case(brains: Path) -> None:
    content = change("train::fixed::1", {"_target_": "Orientationd", "keys": ["image"], "axcodes": "XYZ"})
    with pytest.raises(DataError, match=r"5 of 5 subjects cannot be used(.|\n)*Orientationd of the bundle fails"):
        build(content).load(SiteData("a", brains), seed=0)
    content = change("train::random::0::spatial_size", [99, 99, 99])
    task = build(content)
    batch = task.collate([task.load(SiteData("a", brains), seed=0).train[0]])
    with pytest.raises(DataError, match="random transforms of the bundle fail"):
        task.augment(batch, torch.Generator())


def write(file: Path, values: np.ndarray, affine: np.ndarray | None = None) -> Path:
    nib.save(nib.Nifti1Image(values, np.eye(4) if affine is None else affine), file)
    return file


def load_pairs(folder: Path, label: np.ndarray, affine: np.ndarray | None = None, content: Any = TRAIN) -> Examples:
    """Load two cases of an image ``(6, 6, 6)`` and a label map."""
    for case in "ab":
        write(folder / f"{case}_img.nii.gz", np.arange(216, dtype=np.float32).reshape(6, 6, 6))
        write(folder / f"{case}_seg.nii.gz", label, affine)
    pairs = {"images": ["{case}_img.nii.gz"], "labels": "{case}_seg.nii.gz"}
    task = build(content, pairs=pairs, split={"test": 0.5})
    return task.load(SiteData("a", folder), seed=0)


def make_labels(value: float = 1, shape: tuple[int, ...] = (6, 6, 6)) -> np.ndarray:
    labels = np.zeros(shape, np.float32)
    labels[2, 2, 2] = value
    return labels


@pytest.mark.parametrize(
    ("label", "affine", "message"),
    [
        (make_labels(shape=(6, 6, 8)), None, r"a_seg.nii.gz is 6x6x8, a_img.nii.gz is 6x6x6; expected the same grid"),
        (make_labels(), np.diag([1.0, 1, 2, 1]), r"a_seg.nii.gz lies up to 6.0 mm from a_img.nii.gz; .*same affine"),
        # The same space, but stored from right to left: no transform turns it.
        (
            make_labels(),
            MIRRORED,
            r"a_seg.nii.gz lies up to \d.0 mm from the image after the transforms.*add Orientationd",
        ),
        (make_labels(7), None, r"a_seg.nii.gz: label 7 after .*; expected 0 to 3, because the network has a channel"),
        (make_labels(-1), None, r"a_seg.nii.gz: label -1 after .*; expected 0 to 3"),
        (make_labels(2.5), None, r"a_seg.nii.gz: label 2.5 after .*; expected whole numbers: correct the file"),
        (make_labels(math.nan), None, r"a_seg.nii.gz: label nan after .*; expected whole numbers"),
    ],
)
def test_label_map_that_does_not_fit_its_image_or_the_network_is_named(
    tmp_path: Path, label: np.ndarray, affine: np.ndarray | None, message: str
) -> None:
    with pytest.raises(DataError, match=rf"2 of 2 subjects cannot be used:\n  a: {message}"):
        load_pairs(tmp_path, label, affine)


def test_files_of_one_space_in_two_orientations_fit_after_orientationd(tmp_path: Path) -> None:
    turn = {"_target_": "Orientationd", "keys": ["image", "label"], "axcodes": "RAS"}
    content = change("train::fixed", [*TRAIN["train"]["fixed"], turn])
    examples = load_pairs(tmp_path, make_labels(), MIRRORED, content)
    assert torch.nonzero(examples.train[0]["label"]).tolist() == [[0, 3, 2, 2]]


def test_label_map_lies_where_the_channels_lie_that_a_transform_puts_together(tmp_path: Path) -> None:
    keys, affine = ["t1", "t2"], np.diag([1.0, 1, 2, 1])
    content = change("train::fixed", [{"_target_": "LoadImaged", "keys": [*keys, "label"]}])
    target = LabelMaps(declare(content), ())
    images = [write(tmp_path / f"{key}.nii.gz", np.ones((6, 6, 6), np.float32), affine) for key in keys]

    def put_together(item: dict[str, Any]) -> dict[str, Any]:
        # As a bundle's own transform: a new tensor, which has the affine that MONAI takes without a file.
        return {**item, "image": MetaTensor(np.concatenate([item[key].numpy() for key in keys]))}

    def read_case(label: Path) -> Any:
        transforms = [LoadImaged([*keys, "label"]), EnsureChannelFirstd([*keys, "label"]), put_together]
        return target.read_case(CaseFiles(tuple(images), label), transforms)

    assert read_case(write(tmp_path / "fits.nii.gz", make_labels(), affine))["image"].shape == (2, 6, 6, 6)
    with pytest.raises(DataError, match=r"other.nii.gz lies up to 7.0 mm from the image after the transforms"):
        read_case(write(tmp_path / "other.nii.gz", make_labels(), affine @ MIRRORED))


def test_transforms_that_separate_image_and_label_are_refused(tmp_path: Path) -> None:
    crop = {"_target_": "CenterSpatialCropd", "keys": ["image"], "roi_size": [4, 4, 4]}
    content = change("train::fixed", [*TRAIN["train"]["fixed"], crop])
    with pytest.raises(DataError, match=r"a_seg.nii.gz is 6x6x6 after the transforms of the bundle, the image 4x4x4"):
        load_pairs(tmp_path, make_labels(), content=content)


@pytest.mark.parametrize(
    ("loss", "largest"),
    [
        ({"_target_": "DiceLoss", "sigmoid": True}, 1),
        ({"_target_": "CrossEntropyLoss"}, 3),
        ({"_target_": "monai.losses.TverskyLoss", "to_onehot_y": True}, 3),
    ],
)
def test_largest_label_is_that_of_loss_and_network(tmp_path: Path, loss: dict[str, Any], largest: int) -> None:
    content = change("loss", loss)
    assert load_pairs(tmp_path, make_labels(largest), content=content).n_train == 1
    with pytest.raises(DataError, match=rf"label {largest + 1} .* expected 0 to {largest}"):
        load_pairs(tmp_path, make_labels(largest + 1), content=content)


def test_labels_are_those_that_the_loss_is_given(tmp_path: Path) -> None:
    """One that the loss ignores is no class, and one that is mapped after a random transform is not yet known."""
    ignoring = change("loss", {"_target_": "CrossEntropyLoss", "ignore_index": 255})
    assert load_pairs(tmp_path, make_labels(255), content=ignoring).n_train == 1
    to_class = {"_target_": "MapLabelValued", "keys": "label", "orig_labels": [9], "target_labels": [1]}
    mapping = change("train::random", [*TRAIN["train"]["random"], to_class])
    assert load_pairs(tmp_path, make_labels(9), content=mapping).n_train == 1


def test_plane_images_of_arrays_train_with_labels_of_bool(tmp_path: Path) -> None:
    """A bundle without LoadImaged has arrays as data; photographs have their colours last."""
    keys = ["image", "label"]
    content = change("train::fixed", [
        {"_target_": "CastToTyped", "keys": keys, "dtype": "$(np.float32, torch.bool)"},
        {"_target_": "EnsureChannelFirstd", "keys": "image", "channel_dim": -1},
        {"_target_": "EnsureChannelFirstd", "keys": "label", "channel_dim": "no_channel"},
    ])  # fmt: skip
    content |= {"network_def": TRAIN["network_def"] | {"spatial_dims": 2, "in_channels": 3, "out_channels": 1}}
    content["loss"] = {"_target_": "DiceLoss", "sigmoid": True}
    content["train"]["random"] = [{"_target_": "RandAxisFlipd", "keys": keys, "prob": 1}]
    for case in "ab":
        write(tmp_path / f"{case}_img.nii.gz", np.random.default_rng(0).random((8, 12, 3)).astype(np.float32))
        write(tmp_path / f"{case}_seg.nii.gz", np.eye(8, 12, dtype=np.uint8))
    pairs = {"images": ["{case}_img.nii.gz"], "labels": "{case}_seg.nii.gz"}
    task = build(content, pairs=pairs, split={"test": 0.5})
    batch = task.augment(
        task.collate([task.load(SiteData("a", tmp_path), seed=0).train[0]]), torch.Generator().manual_seed(0)
    )
    assert (batch[0].shape, batch[1].shape, batch[1].sum()) == ((1, 3, 8, 12), (1, 1, 8, 12), 8)
    assert 0 < float(task.loss(task.model(), batch).detach()) < 1


def test_images_of_different_shapes_need_a_crop(tmp_path: Path) -> None:
    content = change("train::preprocessing::transforms", "@train::fixed")
    task = build(content)
    volumes = [torch.zeros(1, side, 4, 4) for side in (4, 5)]
    with pytest.raises(DataError, match=r"differ in shape.*RandCropByPosNegLabeld"):
        task.augment((volumes, volumes), torch.Generator())


def test_saved_bundle_has_the_declared_parts_and_the_weights(tmp_path: Path) -> None:
    task = build(change("train::fixed::2", {"_target_": "EnsureTyped", "keys": "image", "dtype": "$torch.float32"}))
    model = task.model()
    (tmp_path / "a/configs").mkdir(parents=True)
    for folder in "ab":
        task.save(model, tmp_path / folder)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*"))
    weights = ["model.safetensors", "models/model.pt"]
    assert files == [*(f"a/{name}" for name in weights), "b/configs/train.json", *(f"b/{name}" for name in weights)]
    # What is written is a bundle again.
    settings = insert_bundle({"task": {"bundle": str(tmp_path / "b")}})
    assert settings["task"]["declaration"] == task.config.declaration
    state = torch.load(tmp_path / "b/models/model.pt", weights_only=True)
    other = task.model()
    other.load_state_dict(state)
    assert Layout.from_module(other).fingerprint == Layout.from_module(model).fingerprint
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


CLASSIFY: dict[str, Any] = {
    "random": [{"_target_": "RandFlipd", "keys": "image", "prob": 1, "spatial_axis": 0}],
    "fixed": [
        {"_target_": "LoadImaged", "keys": "image"},
        {"_target_": "ToTensord", "keys": "label"},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
    ],
    "network_def": {
        "_target_": "DenseNet121", "spatial_dims": 2, "in_channels": 1, "out_channels": 3, "init_features": 4,
        "growth_rate": 2, "block_config": [1], "bn_size": 1,
    },
    "loss": {"_target_": "torch.nn.CrossEntropyLoss", "reduction": "sum"},
    "train": {
        "preprocessing": {
            "_target_": "Compose",
            "transforms": "$@fixed + @random",
        },
    },
    "validate": {
        "preprocessing": {"_target_": "Compose", "transforms": "@fixed"},
        "postprocessing": {"_target_": "Compose", "transforms": ["$code of a classification is not read"]},
        "key_metric": {"val_accuracy": {"_target_": "ignite.metrics.Accuracy", "output_transform": "$lambda x: x"}},
    },
}  # fmt: skip


def build_classification(**parts: Any) -> BundleTask:
    return build({**CLASSIFY, **parts}, split={"test": 0.5})


def write_image(file: Path, seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, np.random.default_rng(seed).random((12, 8)).astype(np.float32))


def write_list(folder: Path, labels: list[Any], **options: Any) -> None:
    entries = [{"image": f"{number}.nii.gz", "label": label} for number, label in enumerate(labels)]
    for number in range(len(labels)):
        write_image(folder / f"{number}.nii.gz", number)
    (folder / "dataset.json").write_text(json.dumps({"training": entries} if options.get("named") else entries))


@pytest.mark.parametrize("layout", ["list", "decathlon", "folders", "bids", "photographs"])
def test_classes_come_from_a_list_folders_or_participants(tmp_path: Path, layout: str) -> None:
    labels = [0, 2, 1, 2]
    if layout in ("list", "decathlon"):
        write_list(tmp_path, labels, named=layout == "decathlon")
    elif layout == "folders":
        for number, label in enumerate(labels):
            write_image(tmp_path / str(label) / f"image_{number}.nii.gz", number)
    elif layout == "photographs":
        for number, label in enumerate(labels):
            (tmp_path / str(label)).mkdir(exist_ok=True)
            Image.fromarray(np.full((8, 12), 9 * number, np.uint8)).save(tmp_path / str(label) / f"{number}.png")
    else:
        rows = "".join(f"sub-{number}\t{label}\n" for number, label in enumerate(labels))
        (tmp_path / "participants.tsv").write_text(f"participant_id\tlabel\n{rows}")
        for number in range(len(labels)):
            write_image(tmp_path / f"sub-{number}/anat/sub-{number}_T1w.nii.gz", number)
    task = build_classification()
    examples = task.load(SiteData("a", tmp_path), seed=0)
    found = [item["label"].tolist() for part in (examples.train, examples.test) for item in part]  # type: ignore[attr-defined]
    assert (sorted(found), examples.n_train, task.kind) == ([[0.0], [1.0], [2.0], [2.0]], 2, "classes")
    assert {item["image"].shape for item in examples.train} == {(1, 12, 8)}  # type: ignore[attr-defined]
    cohort = task.cohort(tmp_path)
    assert sorted(cohort.columns["label"]) == ["0", "1", "2", "2"]


def test_loss_and_accuracy_of_a_classification_are_those_of_torch(tmp_path: Path) -> None:
    write_list(tmp_path, [0, 2, 1, 2])
    task = build_classification()
    examples = task.load(SiteData("a", tmp_path), seed=0)
    whole = task.collate([*examples.train, *examples.test])  # type: ignore[misc]
    images, labels = task.augment(whole, torch.Generator().manual_seed(1))
    flipped = torch.stack([torch.as_tensor(image).flip(1) for image in whole[0]])
    assert torch.equal(images, flipped)
    torch.manual_seed(0)
    model = task.model().eval()
    expected = torch.nn.functional.cross_entropy(model(images), labels[:, 0].long(), reduction="sum")
    assert torch.equal(task.loss(model, (images, labels)), expected)
    probabilities, classes = task.predict(model, whole)
    torch.testing.assert_close(probabilities, torch.softmax(model(torch.stack([*map(torch.as_tensor, whole[0])])), 1))
    hits = (probabilities.argmax(1) == classes[:, 0]).double().mean().item()
    assert task.metrics(probabilities, classes) == {"val_accuracy": hits}
    assert 0 <= task.evaluate(model, examples.test)["val_accuracy"] <= 1


def test_key_metric_of_a_classification_is_its_accuracy_or_area_under_the_curve() -> None:
    probabilities = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7]])
    classes = torch.tensor([[0.0], [1.0], [1.0], [0.0]])
    assert build_classification().metrics(probabilities, classes) == {"val_accuracy": 0.5}
    task = build_classification(validate={"key_metric": {"val_auc": {"_target_": "ROCAUC", "average": "macro"}}})
    assert task.metric.may_be_undefined
    # Class 0: of four pairs 0.6 is above both, 0.1 above none. Class 1: 0.5 and 0.4 are above 0.3 and 0.2. No class 2.
    assert task.metrics(probabilities, classes) == {"val_auc": pytest.approx((0.5 + 1.0) / 2)}
    assert task.metrics(probabilities, classes * 0) == {}
    with pytest.raises(MetricsError, match="the network predicts NaN"):
        task.metrics(probabilities * math.nan, classes)


def test_two_classes_may_have_one_output(tmp_path: Path) -> None:
    write_list(tmp_path, [0, 1])
    task = build_classification(
        network_def={**CLASSIFY["network_def"], "out_channels": 1}, loss={"_target_": "BCEWithLogitsLoss"}
    )
    examples = task.load(SiteData("a", tmp_path), seed=0)
    images, labels = task.augment(task.collate([*examples.train, *examples.test]), torch.Generator())  # type: ignore[misc]
    model = task.model().eval()
    expected = torch.nn.functional.binary_cross_entropy_with_logits(model(images), labels)
    assert torch.equal(task.loss(model, (images, labels)), expected)
    probabilities, _ = task.predict(model, ([*images], [*labels]))
    torch.testing.assert_close(probabilities[:, 1], torch.sigmoid(model(images))[:, 0])


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (3, "its label is 3; expected 0 to 2, the classes of the network"),
        ("polyp", "it has the label 'polyp'; expected the number of its class, from 0"),
        (-1, "it has the label '-1'; expected the number"),
        (None, "it has the label 'None'; expected the number"),
    ],
)
def test_class_that_the_network_lacks_is_named_with_the_image(tmp_path: Path, label: Any, message: str) -> None:
    write_list(tmp_path, [0, label])
    with pytest.raises(DataError, match=rf"1 of 2 subjects cannot be used:\n  1.nii.gz: {message}"):
        build_classification().load(SiteData("a", tmp_path), seed=0)


def test_data_without_classes_is_refused_with_what_is_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no images to classify; expected a BIDS data set with a column label in"):
        build_classification().load(SiteData("a", tmp_path), seed=0)
    (tmp_path / "dataset.json").write_text('{"training": [{"image": "a.nii.gz"}]}')
    with pytest.raises(DataError, match=r'dataset.json: expected \[{"image": FILE, "label": NUMBER}, ...\], alone or'):
        build_classification().load(SiteData("a", tmp_path), seed=0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"network_def": {"_target_": "UNet"}}, "found 'UNet'; expected one of DenseNet, DenseNet121"),
        ({"network_def": {**CLASSIFY["network_def"], "pretrained": True}}, "weights cannot be downloaded"),
        ({"network_def": {**CLASSIFY["network_def"], "out_channels": 1}}, "has 1 outputs; expected 2 or more, one for"),
        (
            {"validate": {"key_metric": {"val_f1": {"_target_": "ConfusionMatrix"}}}},
            "key_metric::val_f1: found 'ConfusionMatrix'; expected one of Accuracy, ROCAUC, ROCAUCMetric",
        ),
        ({"loss": {"_target_": "BCEWithLogitsLoss"}}, "has 3 outputs; expected 1, because BCEWithLogitsLoss has two"),
        (
            {"train": {"preprocessing": [{"_target_": "LoadImaged", "keys": ["image", "label"]}]}},
            "LoadImaged loads image, label; expected the same files everywhere, image alone",
        ),
    ],
)
def test_classification_that_cannot_be_trained_is_refused_with_the_item(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        declare({**CLASSIFY, **parts})


def test_arguments_that_a_network_passes_on_are_known() -> None:
    network = declare({**CLASSIFY, "network_def": {"_target_": "SEResNet50", "spatial_dims": 2, "in_channels": 3,
                                                   "num_classes": 2}}).network  # fmt: skip
    assert (network.find_argument("num_classes"), network.find_argument("inplanes")) == (2, 64)
    with pytest.raises(ConfigError, match="SEResNet50 has no such argument"):
        declare({**CLASSIFY, "network_def": {"_target_": "SEResNet50", "classes": 2}})
