"""Segmentation of volumes of any shape, the MONAI way: patches by label, Dice and cross-entropy, a sliding window.

Dice and the 95 % Hausdorff distance are defined for every case, so that their means are comparable.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from ..core.errors import DataError, require_extra
from .adaptation import AdaptableTask, AdaptedTaskConfig
from .data.augmentation import Augmentation
from .data.bids import CaseFiles, index_cases
from .data.cases import FileSettings, describe_left_out, find_images, load_cases, select_cases
from .data.nifti import read_nifti
from .data.segmentation import Item, Preparation, read_item, sample_patch, take_central_patch, write_labels
from .models import ModelConfig, require_input
from .models.shapes import Volume
from .task import Cohort, Examples, Metric, Picture, SiteData


def name_metrics(classes: Sequence[str], *, hd95: bool) -> list[str]:
    """Return the names of the values of :func:`measure_case`.

    >>> name_metrics(["anterior", "posterior"], hd95=True)
    ['dice', 'dice_anterior', 'dice_posterior', 'hd95', 'hd95_anterior', 'hd95_posterior']
    """
    return [
        name for kind in (["dice", "hd95"] if hd95 else ["dice"]) for name in [kind, *(f"{kind}_{c}" for c in classes)]
    ]


def measure_case(predicted: Tensor, labels: Tensor, classes: int, spacing: Sequence[float], *, hd95: bool) -> Tensor:
    """Return the metrics of one case, float64: Dice, their mean over classes first, then HD95 in mm likewise.

    Where a class is neither present nor predicted, Dice is 1 and HD95 is 0. Where it is only one of both, Dice is 0 and
    HD95 is the diagonal of the volume, the largest distance that two of its voxels can have (the convention of BraTS,
    Bakas et al. 2018, with a diagonal of 373 mm).

    Args:
        predicted: classes ``(d, h, w)``, 0 for background.
        labels: true classes, likewise.
        classes: number of classes.
        spacing: size of a voxel in mm per axis.
        hd95: whether to compute HD95.
    """
    from monai.metrics import compute_dice, compute_hausdorff_distance

    diagonal = float(sum((side * length) ** 2 for side, length in zip(spacing, labels.shape, strict=True)) ** 0.5)
    dice, distances = [], []
    for number in range(1, classes + 1):
        guess, truth = ((part == number)[None, None] for part in (predicted.cpu(), labels.cpu()))
        dice.append(float(compute_dice(guess.float(), truth.float(), include_background=True, ignore_empty=False)))
        if hd95 and bool(guess.any()) and bool(truth.any()):
            # MONAI 1.6 passes an argument to itself that it has deprecated.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                distance = compute_hausdorff_distance(guess, truth, True, percentile=95, spacing=list(spacing))
            distances.append(float(distance))
        else:
            distances.append(0.0 if guess.any() == truth.any() else diagonal)
    kinds = [dice, distances] if hd95 else [dice]
    return torch.tensor([value for kind in kinds for value in [sum(kind) / classes, *kind]], dtype=torch.float64)


class SegmentationConfig(Preparation, FileSettings, AdaptedTaskConfig):
    """Files, classes, preprocessing, patches and network; the same at every site."""

    model: Annotated[ModelConfig, require_input("patch")] = ModelConfig(name="basic_unet")
    """network and its settings"""
    patch: Volume = (64, 64, 64)
    """voxels of a training patch and of the sliding window, per axis"""
    foreground: float = Field(0.67, ge=0, le=1)
    """share of the training patches that are centred on a voxel of a random class"""
    overlap: float = Field(0.25, ge=0, lt=1)
    """share by which neighbouring sliding windows overlap"""
    hd95: bool = True
    """compute the 95 % Hausdorff distance, which takes longer than Dice"""
    augmentation: Augmentation = Field(default_factory=Augmentation)
    """random changes of the training patches; none by default"""


class Segmentation(AdaptableTask):
    """A class for every voxel; minibatches are images ``(B, C, d, h, w)``, labels ``(B, d, h, w)`` and spacings.

    Images and labels of different shapes are lists of tensors without the first axis.
    """

    Config = SegmentationConfig
    config: SegmentationConfig
    metric = Metric("dice", "", "max")
    reads = (
        "images and label maps in NIfTI: a BIDS data set with derivatives/*/sub-*/anat/*_dseg.nii.gz, a folder of the "
        "Medical Segmentation Decathlon with dataset.json, or files by task.pairs"
    )

    def build_network(self) -> nn.Module:
        """Return the configured network with one logit for the background and one for each class."""
        config = self.config
        return config.model.build(patch=config.patch, inputs=config.channels, outputs=1 + len(config.classes))

    def cohort(self, path: Path) -> Cohort:
        """Return the cases with the columns of ``participants.tsv``, if the data has one."""
        return index_cases(self._find_cases(path))

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read and check every case; the cases of a subject are in the same part of the split."""
        cases, read = self._find_cases(data.path), partial(read_item, preparation=self.config)
        # Without resampling both grids are the same.
        evaluated = None if self.config.spacing is None else partial(read, on_grid=False)
        warnings = describe_left_out(cases, data.path)
        return load_cases(self.config, data, seed, cases, read, read_evaluated=evaluated, warnings=warnings)

    def _find_cases(self, path: Path) -> dict[str, CaseFiles]:
        if self.config.hd95:
            with require_extra("task.hd95, unless you set it to false,", "segmentation"):
                import scipy  # noqa: F401
        return self.config.find_cases(path)

    def collate(self, examples: Sequence[Item]) -> tuple[Any, Any, Tensor]:
        """Return a minibatch; images and labels of different shapes stay lists."""
        images, labels, spacings = (list(part) for part in zip(*examples, strict=True))
        return _stack(images), _stack(labels), torch.stack(spacings)

    def iterate_batches(self, dataset: Dataset[Any], batch_size: int) -> Iterator[Any]:
        """Yield the cases one by one: whole volumes are large, and their shapes differ."""
        return super().iterate_batches(dataset, 1)

    def augment(self, batch: Any, generator: torch.Generator) -> Any:
        """Return random patches, changed by ``augmentation``; the first axis of a volume in RAS is left to right."""
        images, labels, spacings = batch
        pairs = zip(images, labels, strict=True)
        patches = [sample_patch(*pair, self.config.patch, self.config.foreground, generator) for pair in pairs]
        image, label = (torch.stack(part) for part in zip(*patches, strict=True))
        return *self.config.augmentation.apply(image, generator, mirrored_axis=0, labels=label), spacings

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the sum of the Dice loss and the cross-entropy, a scalar, of whole patches.

        Minibatches of whole volumes, as scores have them, are cut to their central patches.
        """
        images, labels, _ = batch
        if not isinstance(images, Tensor) or tuple(images.shape[2:]) != self.config.patch:
            patches = [take_central_patch(*pair, self.config.patch) for pair in zip(images, labels, strict=True)]
            images, labels = (torch.stack(part) for part in zip(*patches, strict=True))
        from monai.losses import DiceCELoss

        compute_loss = DiceCELoss(to_onehot_y=True, softmax=True, include_background=False)
        # Sums over all voxels of a patch need more digits than bfloat16 has.
        loss: Tensor = compute_loss(model(images).float(), labels[:, None])
        return loss

    def segment(self, model: nn.Module, image: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the classes of a whole image ``(channels, d, h, w)``, by sliding windows.

        They are uint8 of ``shape``, the grid that the image was resampled from.
        """
        from monai.inferers import sliding_window_inference

        logits: Any = sliding_window_inference(
            image[None], self.config.patch, 1, model, overlap=self.config.overlap, mode="gaussian"
        )
        if tuple(logits.shape[2:]) != tuple(shape):
            logits = functional.interpolate(logits, size=tuple(shape), mode="trilinear")
        classes: Tensor = logits[0].argmax(dim=0).to(torch.uint8)
        return classes

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predicted and true classes ``(B, d, h, w)`` of volumes of one shape."""
        images, labels, _ = batch
        return torch.stack(
            [self.segment(model, image, label.shape) for image, label in zip(images, labels, strict=True)]
        ), torch.stack(list(labels))

    @torch.no_grad()
    def illustrate(self, model: nn.Module, batch: Any) -> Picture:
        """Return the axial slice with the most labelled voxels, front at the top."""
        images, _, spacings = batch
        predicted, truth = (classes[0].cpu() for classes in self.predict(model, batch))
        image = images[0][:1]
        if image.shape[1:] != truth.shape:
            image = functional.interpolate(image[None], size=tuple(truth.shape), mode="trilinear")[0]
        seen = truth if bool(truth.any()) else predicted
        level = int((seen != 0).sum((0, 1)).argmax())
        # Turn (left to right, back to front) into rows from front to back and columns from left to right.
        picture, marks, guess = (part[..., level].T.flip(0).numpy() for part in (image[0].cpu(), truth, predicted))
        width, height = spacings[0, :2].tolist()
        return Picture(picture, marks, guess, height / width)

    @torch.no_grad()
    def write_predictions(self, model: nn.Module, data: SiteData, out: Path) -> Iterator[Path]:
        """Write a label map ``CASE_dseg.nii.gz`` for each image, with its grid and the first label of each class."""
        config = self.config
        values = torch.tensor([0, *(labels[0] for labels in config.labels)])
        device = next(model.parameters()).device
        cases = find_images(data.path, config.suffixes, config.derivative, config.pairs)
        for name, case in select_cases(data, cases).items():
            if case.problem:
                raise DataError(f"{data.path}: {name}: {case.problem}")
            image, canonical = config.read_image(case.images)
            classes = self.segment(model, image.to(device), canonical.shape[:3]).cpu()
            file = out / f"{name}_dseg.nii.gz"
            write_labels(file, values[classes.long()], read_nifti(case.images[0], None, canonical=False))
            yield file

    def measure(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the metrics ``(B, m)`` and the voxels of each class ``(B, classes)`` of every case."""
        rows, sizes = [], []
        for image, label, spacing in zip(*batch, strict=True):
            predicted = self.segment(model, image, label.shape)
            rows.append(
                measure_case(predicted, label, len(self.config.classes), spacing.tolist(), hd95=self.config.hd95)
            )
            sizes.append(torch.bincount(label.flatten().long().cpu(), minlength=1 + len(self.config.classes))[1:])
        return torch.stack(rows), torch.stack(sizes)

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return Dice and HD95 in mm, by class and their mean over classes: means over cases."""
        names = name_metrics(list(self.config.classes), hd95=self.config.hd95)
        means = predictions.double().mean(dim=0).tolist()
        return dict(zip(names, means, strict=True))


def _stack(volumes: list[Tensor]) -> Tensor | list[Tensor]:
    """Return volumes of one shape as one tensor, others as a list."""
    return torch.stack(volumes) if len({volume.shape for volume in volumes}) == 1 else volumes
