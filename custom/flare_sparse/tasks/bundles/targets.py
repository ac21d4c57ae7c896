"""What the labels of a bundle's cases are, label maps or classes: where they are found, checked and measured.

The bundle's loss and its network determine which values a label map may have.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from ...core.errors import DataError, MetricsError
from ...core.ranking import compute_auc
from ..data.bids import CaseFiles
from ..data.cases import CLASS, PHOTOGRAPHS, Pairs, find_cases, find_classes
from ..data.segmentation import check_volumes
from ..task import Kind
from .cases import Item, check_label_map, describe_cause, strip_metadata
from .components import LOWER_IS_BETTER, Component, build_all
from .declaration import BINARY_LOSS, Declaration

_SAME_VALUES = frozenset(
    "monai.transforms." + name
    for name in (
        "Orientationd", "Spacingd", "Resized", "Zoomd", "Flipd", "Rotate90d", "CropForegroundd", "CenterSpatialCropd",
        "SpatialCropd", "SpatialPadd", "DivisiblePadd", "ResizeWithPadOrCropd", "EnsureTyped", "CastToTyped",
    )
)  # fmt: skip
"""Transforms of volumes, besides the random ones, that give a label map no other labels."""
_RANDOM = "monai.transforms.Rand"


@final
@dataclass(frozen=True)
class LabelRange:
    """Labels that a loss takes.

    Attributes:
        largest: largest label; the smallest is 0.
        is_class: whether labels are numbers of classes; False: a map for each channel, with values from 0 to 1.
        ignored: label that the loss leaves out, allowed besides; None: there is none.
    """

    largest: int
    is_class: bool
    ignored: int | None

    @classmethod
    def from_declaration(cls, declaration: Declaration, remaining: Sequence[Component]) -> LabelRange | None:
        """Return the labels that the loss of a bundle takes; None if they are not known.

        Args:
            declaration: the parts of the bundle.
            remaining: transforms of training cases between the label maps to check and the loss.
        """
        channels, loss = declaration.num_outputs, declaration.loss
        changes = (c for c in remaining if "label" in c.args.get("keys", ()) and c.path not in _SAME_VALUES)
        if channels is None or any(not component.path.startswith(_RANDOM) for component in changes):
            return None
        is_class = bool(loss.find_argument("to_onehot_y")) or loss.path == "torch.nn.CrossEntropyLoss"
        # MONAI ignores to_onehot_y where the network has one channel: labels are 0 and 1.
        largest = max(channels - 1, 1) if is_class else 1
        return cls(largest, is_class, loss.find_argument("ignore_index"))

    def check(self, labels: Tensor, file: str) -> None:
        """Check the label map of a case after the transforms.

        Args:
            labels: the label map.
            file: name of its file, for errors.

        Raises:
            DataError: a label is out of range, or a fraction where labels are numbers of classes.
        """
        values = torch.unique(labels).double()
        values = values if self.ignored is None else values[values != self.ignored]
        # Comparisons with NaN are false.
        if self.is_class and len(fractions := values[~(values == values.round())]):
            raise DataError(
                f"{_describe(file, fractions[0])}; expected whole numbers: correct the file, or give label the mode "
                "nearest in Spacingd and Resized"
            )
        if len(others := values[~((values >= 0) & (values <= self.largest))]):
            reason = "the network has a channel for each label" if self.is_class else "the loss has no to_onehot_y"
            raise DataError(
                f"{_describe(file, others[0])}; expected 0 to {self.largest}, because {reason}: correct the file, map "
                "its labels with MapLabelValued, or correct loss or out_channels"
            )


def _describe(file: str, value: Tensor) -> str:
    return f"{file}: label {float(value):g} after the transforms of the bundle"


class Target(ABC):
    """Labels of the cases of a bundle.

    Attributes:
        kind: what they are for comparisons of runs; None: runs are compared by their metrics only.

    Args:
        declaration: the parts of the bundle.
        random: its transforms of training cases from the first random one on.
    """

    kind: ClassVar[Kind | None] = None

    def __init__(self, declaration: Declaration, random: Sequence[Component]):
        self._declaration, self._random = declaration, random
        self._axes = 2 if declaration.network.find_argument("spatial_dims") == 2 else 3

    @abstractmethod
    def find_cases(
        self, path: Path, suffixes: Sequence[str], derivative: str, pairs: Pairs | None
    ) -> dict[str, CaseFiles]:
        """Return the cases of a site, as :func:`find_cases` does."""

    @abstractmethod
    def check_files(self, files: CaseFiles) -> None:
        """Check the files of a case.

        Raises:
            DataError: one is missing or damaged, or does not fit the others.
        """

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
        label = self.convert_label(item.get("label"), image, files)
        if not bool(torch.isfinite(image).all()):
            raise DataError("voxels of the image are NaN or infinite")
        return {"image": image, "label": label}

    @abstractmethod
    def get_label(self, files: CaseFiles) -> str | int:
        """Return the label of a case as the transforms receive it.

        Raises:
            DataError: there is none.
        """

    @abstractmethod
    def convert_label(self, label: Any, image: Tensor, files: CaseFiles) -> Tensor:
        """Return the label that the transforms give, as a tensor.

        Raises:
            DataError: it does not fit the image.
        """

    @abstractmethod
    def check_range(self, label: Tensor, files: CaseFiles) -> None:
        """Check that loss and network have such a label.

        Raises:
            DataError: they have not.
        """

    @abstractmethod
    def predict(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the prediction for a case and its label, both without a batch."""

    def measure(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return what :meth:`compute_metrics` needs of a case, both without a batch."""
        return self.predict(model, image, label)

    @abstractmethod
    def compute_metrics(self, measured: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the key metric of some cases, by its name; nothing where it is undefined."""

    def _compute_logits(self, model: nn.Module, image: Tensor) -> Tensor:
        """Return the network's output for one image, without a batch."""
        logits: Tensor = self._declaration.inferer.build()(strip_metadata(image)[None], model)
        return logits[0]


class LabelMaps(Target):
    """A label map ``(1, d, h, w)`` for each image."""

    def __init__(self, declaration: Declaration, random: Sequence[Component]):
        super().__init__(declaration, random)
        self._range = LabelRange.from_declaration(declaration, random)

    def find_cases(
        self, path: Path, suffixes: Sequence[str], derivative: str, pairs: Pairs | None
    ) -> dict[str, CaseFiles]:
        return find_cases(path, suffixes, derivative, pairs)

    def check_files(self, files: CaseFiles) -> None:
        labels = files.require_labels()
        check_volumes((*files.images, labels), self._axes)

    def get_label(self, files: CaseFiles) -> str:
        """Return the file of the label map."""
        return str(files.require_labels())

    def convert_label(self, label: Any, image: Tensor, files: CaseFiles) -> Tensor:
        """Return the label map, which has the image's voxels."""
        return check_label_map(label, image, files.require_labels().name)

    def check_range(self, label: Tensor, files: CaseFiles) -> None:
        if self._range is not None:
            self._range.check(label, files.require_labels().name)

    def predict(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return prediction and label map after ``validate::postprocessing``."""
        from monai.transforms import Compose

        item = {"pred": self._compute_logits(model, image), "label": strip_metadata(label)}
        item = Compose(build_all(self._declaration.postprocessing))(item)
        return strip_metadata(item["pred"]), strip_metadata(item["label"])

    def measure(self, model: nn.Module, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key metric of a case ``(1,)``, its mean over classes, and the number of voxels with a label.

        Classes for which MONAI leaves it undefined are left out of the mean; a case without any is NaN. A distance of a
        class that is only present or only predicted is the diagonal of the volume, in voxels.
        """
        metric = self._declaration.metric
        predicted, truth = self.predict(model, image, label)
        # MONAI warns of an argument that it passes to itself, and of every class that a case does not have.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = metric.build()(y_pred=[predicted], y=[truth]).double().flatten()
        if metric.path in LOWER_IS_BETTER:
            background = bool(metric.args.get("include_background", False))
            values = _complete_distances(values, predicted, truth, background=background)
        size = strip_metadata(label).count_nonzero().reshape(1)
        return values[values.isfinite()].mean().reshape(1).cpu(), size.cpu()

    def compute_metrics(self, measured: Tensor, labels: Tensor) -> dict[str, float]:
        """Return the mean of the key metric over the cases for which it is defined."""
        defined = measured[measured.isfinite()]
        return {self._declaration.metric_name: float(defined.mean())} if defined.numel() else {}


class Classes(Target):
    """A class for each image, from 0, as a float tensor ``(1,)``."""

    kind = "classes"

    def find_cases(
        self, path: Path, suffixes: Sequence[str], derivative: str, pairs: Pairs | None
    ) -> dict[str, CaseFiles]:
        return find_classes(path, suffixes)

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


TARGETS: Mapping[str, type[Target]] = {"segmentation": LabelMaps, "classification": Classes}
"""Labels of a bundle by its purpose."""


def _complete_distances(values: Tensor, predicted: Tensor, truth: Tensor, *, background: bool) -> Tensor:
    """Return the distances ``(classes,)`` of a case: the diagonal for a class that only one of the two maps has.

    Where neither has it, the distance is NaN.

    Args:
        values: MONAI's distances. A class that is missed is NaN there, so that a mean without it would reward a model
            that predicts nothing.
        predicted: predictions ``(channels, d, h, w)``.
        truth: label maps, likewise.
        background: whether the first channel has a distance; the only channel always has one.
    """
    start = 0 if background or len(truth) == 1 else 1
    is_predicted, is_present = (part[start:].flatten(1).any(1) for part in (predicted, truth))
    sides = truth.shape[1:]
    completed = values.masked_fill(is_predicted ^ is_present, math.dist(sides, [0] * len(sides)))
    return completed.masked_fill(~is_predicted & ~is_present, math.nan)
