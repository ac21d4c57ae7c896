"""What the labels of a bundle's cases are, label maps or classes: where they are found, checked and measured.

The bundle's loss and its network determine which values a label map may have.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.errors import DataError, MetricsError, describe_exception, format_shape
from ...core.ranking import compute_auc
from ..data.bids import CaseFiles
from ..data.cases import CLASS, PHOTOGRAPHS
from ..data.segmentation import AFFINE_TOLERANCE_MM, check_volumes, measure_distance
from .components import Component, build_all
from .declaration import BINARY_LOSS, Declaration

Item = Mapping[str, Tensor]
"""Image ``(channels, d, h, w)`` of a case and its label, a map ``(1, d, h, w)`` or a class ``(1,)``, by name."""
_SAME_VALUES = frozenset(
    "monai.transforms." + name
    for name in (
        "Orientationd", "Spacingd", "Resized", "Zoomd", "Flipd", "Rotate90d", "CropForegroundd", "CenterSpatialCropd",
        "SpatialCropd", "SpatialPadd", "DivisiblePadd", "ResizeWithPadOrCropd", "EnsureTyped", "CastToTyped",
    )
)  # fmt: skip
"""Transforms of volumes, besides the random ones, that give a label map no other labels."""
_RANDOM = "monai.transforms.Rand"


class LabelMaps:
    """Labels of the cases of a bundle that segments: a map ``(1, d, h, w)`` for each image.

    Args:
        declaration: the parts of the bundle.
        random: its transforms of training cases from the first random one on.
    """

    def __init__(self, declaration: Declaration, random: Sequence[Component]):
        self._declaration = declaration
        self._axes = 2 if declaration.network.find_argument("spatial_dims") == 2 else 3
        changes = (c for c in random if "label" in c.args.get("keys", ()) and c.path not in _SAME_VALUES)
        # Other transforms may give the loss other labels than those that are checked.
        self._are_final = all(component.path.startswith(_RANDOM) for component in changes)

    def check_files(self, files: CaseFiles) -> None:
        """Check the files of a case.

        Raises:
            DataError: one is missing or damaged, or does not fit the others.
        """
        check_volumes((*files.images, files.require_labels()), self._axes)

    def read_case(self, files: CaseFiles, transforms: Sequence[Any]) -> Item:
        """Read the files of a case with a bundle's transforms, of which the first one loads them.

        Raises:
            DataError: a file or the label is missing or damaged, a transform fails, or the label that the transforms
                give does not fit the image.
        """
        images = [str(file) for file in files.images]
        keys = self._declaration.image_keys
        if len(keys) > 1 and len(keys) != len(images):
            raise DataError(
                f"it has {len(images)} images; the bundle loads {len(keys)}, {', '.join(keys)}: name one file for each "
                "in this order in task.pairs.images or task.suffixes"
            )
        given: list[Any] = images if len(keys) > 1 or len(images) == 1 else [images]
        item: Any = {**dict(zip(keys, given, strict=True)), "label": self.get_label(files)}
        for transform in transforms:
            try:
                item = transform(item)
            # Readers and transforms raise errors of many classes.
            except Exception as error:
                raise DataError(f"{type(transform).__name__} of the bundle fails: {describe_cause(error)}") from error
        image = item.get("image")
        if not isinstance(image, Tensor):
            raise DataError("the bundle's transforms give no image with one axis of channels")
        # A transform that puts channels together gives a new tensor, which has MONAI's default and no file's affine.
        read = [v for v in (image, item.get(keys[0])) if "original_affine" in getattr(v, "meta", ())]
        placed = next((v for v in read if v.shape[1:] == image.shape[1:]), image)
        label = self.convert_label(item.get("label"), placed, files)
        if not bool(torch.isfinite(image).all()):
            raise DataError("voxels of the image are NaN or infinite")
        return {"image": image, "label": label}

    def get_label(self, files: CaseFiles) -> str | int:
        """Return the label of a case as the transforms receive it: the file of the label map.

        Raises:
            DataError: there is none.
        """
        return str(files.require_labels())

    def convert_label(self, label: Any, image: Tensor, files: CaseFiles) -> Tensor:
        """Return the label that the transforms give, as a tensor: a label map, which has the image's voxels.

        Files of the same space may be stored in different orders of their axes, which only some transforms undo.

        Raises:
            DataError: it is no volume, or shapes or affines, where MONAI keeps them, differ.
        """
        if not (isinstance(label, Tensor) and image.ndim == label.ndim):
            raise DataError("the bundle's transforms give no image and label map with one axis of channels each")
        file, shape, expected = files.require_labels().name, label.shape[1:], image.shape[1:]
        if shape != expected:
            raise DataError(
                f"{file} is {format_shape(shape)} after the transforms of the bundle, the image "
                f"{format_shape(expected)}; expected the same shape: give both keys, image and label, to Spacingd, "
                "Resized and every crop"
            )
        affines = [volume.affine.cpu().double().numpy() for volume in (label, image) if hasattr(volume, "affine")]
        if len(shape) != 3 or len(affines) != 2:
            return label
        distance = measure_distance(shape, *affines)
        if distance > AFFINE_TOLERANCE_MM:
            raise DataError(
                f"{file} lies up to {distance:.1f} mm from the image after the transforms of the bundle; expected the "
                "same affine: add Orientationd with both keys, image and label, or store both files in one orientation"
            )
        return label

    def check_range(self, label: Tensor, files: CaseFiles) -> None:
        """Check that loss and network have such a label, where they say which they have.

        Raises:
            DataError: a label is out of range, or a fraction where labels are numbers of classes.
        """
        channels, loss, file = self._declaration.num_outputs, self._declaration.loss, files.require_labels().name
        if channels is None or not self._are_final:
            return
        # Otherwise there is a map for each channel, with values from 0 to 1.
        is_class = bool(loss.find_argument("to_onehot_y")) or loss.path == "torch.nn.CrossEntropyLoss"
        # MONAI ignores to_onehot_y where the network has one channel: labels are 0 and 1.
        largest = max(channels - 1, 1) if is_class else 1
        ignored, values = loss.find_argument("ignore_index"), torch.unique(label).double()
        values = values if ignored is None else values[values != ignored]
        # Comparisons with NaN are false.
        if is_class and len(fractions := values[~(values == values.round())]):
            raise DataError(
                f"{_describe(file, fractions[0])}; expected whole numbers: correct the file, or give label the mode "
                "nearest in Spacingd and Resized"
            )
        if len(others := values[~((values >= 0) & (values <= largest))]):
            reason = "the network has a channel for each label" if is_class else "the loss has no to_onehot_y"
            raise DataError(
                f"{_describe(file, others[0])}; expected 0 to {largest}, because {reason}: correct the file, map its "
                "labels with MapLabelValued, or correct loss or out_channels"
            )

    def _compute_logits(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return the network's output for one image, without a batch."""
        logits: Tensor = self._declaration.inferer.build()(strip_metadata(image)[None], model)
        return logits[0]

    def predict(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return prediction and label map after ``validate::postprocessing``."""
        from monai.transforms import Compose

        item = {"pred": self._compute_logits(model, image), "label": strip_metadata(label)}
        item = Compose(build_all(self._declaration.postprocessing))(item)
        return strip_metadata(item["pred"]), strip_metadata(item["label"])

    def measure(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key metric of a case ``(1,)``, its mean over classes, and the number of voxels with a label.

        Classes for which MONAI leaves it undefined are left out of the mean; a case without any is NaN.
        """
        predicted, truth = self.predict(model, image, label)
        # MONAI warns of an argument that it passes to itself, and of every class that a case does not have.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = self._declaration.metric.build()(y_pred=[predicted], y=[truth]).double().flatten()
        size = strip_metadata(label).count_nonzero().reshape(1)
        return values[values.isfinite()].mean().reshape(1).cpu(), size.cpu()

    def compute_metrics(self, measured: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the mean of the key metric over the cases for which it is defined."""
        defined = measured[measured.isfinite()]
        return {self._declaration.metric_name: float(defined.mean())} if defined.numel() else {}


class Classes(LabelMaps):
    """Labels of the cases of a bundle that classifies: a class for each image, from 0, as a float tensor ``(1,)``."""

    def check_files(self, files: CaseFiles) -> None:
        files.require_images()
        # Photographs are read by the transforms alone.
        if not all(file.name.lower().endswith(PHOTOGRAPHS) for file in files.images):
            check_volumes(files.images, self._axes)

    def get_label(self, files: CaseFiles) -> int:
        """Return the number of the class."""
        text = files.row.get(CLASS, "")
        if not (text.isascii() and text.isdecimal()):
            found = f"the {CLASS} {text!r}" if text else f"no {CLASS}"
            raise DataError(f"it has {found}; expected the number of its class, from 0")
        return int(text)

    def convert_label(self, label: Any, image: Tensor, files: CaseFiles) -> Tensor:
        """Return the class, which transforms may turn into a tensor of one number."""
        number = torch.as_tensor(label).flatten().float()
        if len(number) != 1:
            raise DataError(
                f"the bundle's transforms give a {CLASS} of {len(number)} numbers; expected that of a class"
            )
        return strip_metadata(number)

    def check_range(self, label: Tensor, files: CaseFiles) -> None:
        largest = max((self._declaration.num_outputs or 0) - 1, 1)
        if label > largest:
            raise DataError(f"its {CLASS} is {label.item():g}; expected 0 to {largest}, the classes of the network")

    def predict(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability of each class ``(classes,)``, and the class ``(1,)``."""
        logits = self._compute_logits(model, image).float()
        if self._declaration.loss.path == BINARY_LOSS:
            logits = torch.cat([torch.zeros_like(logits), logits])
        return torch.softmax(logits, dim=0), strip_metadata(label)

    def measure(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        return self.predict(model, image, label)

    def compute_metrics(self, measured: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the accuracy, or the mean AUC of a class against the others.

        Raises:
            MetricsError: a probability is NaN, which would count as the first class.
        """
        if bool(measured.isnan().any()):
            raise MetricsError("task.bundle: the network predicts NaN: it has diverged, or images contain NaN")
        classes, name = labels[:, 0].long(), self._declaration.metric_name
        if self._declaration.metric.path == "accuracy":
            return {name: (measured.argmax(dim=1) == classes).double().mean().item()}
        is_class = torch.stack([classes == number for number in range(measured.shape[1])], dim=1)
        # The second of two classes says all; a class that all cases have, or none, has no AUC.
        chosen = [1] if measured.shape[1] == 2 else range(measured.shape[1])
        defined = [number for number in chosen if 0 < int(is_class[:, number].sum()) < len(classes)]
        values = [compute_auc(measured[:, number], is_class[:, number]) for number in defined]
        return {name: sum(values) / len(values)} if values else {}


def describe_cause(error: BaseException) -> str:
    """Return the text of the error that MONAI wraps in others, which name the object and not the reason."""
    while error.__cause__ is not None:
        error = error.__cause__
    return describe_exception(error)


def strip_metadata(volume: Tensor) -> Tensor:
    """Return a plain tensor of numbers; MONAI's carries the affine and the file's name along."""
    plain: Tensor = volume.as_tensor() if hasattr(volume, "as_tensor") else volume
    # No loss subtracts booleans, which ConvertToMultiChannelBasedOnBratsClassesd gives.
    return plain.float() if plain.dtype == torch.bool else plain


def _describe(file: str, value: Tensor) -> str:
    return f"{file}: label {float(value):g} after the transforms of the bundle"
