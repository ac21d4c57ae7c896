"""Brain age and sex from T1-weighted volumes in BIDS data sets."""

from abc import ABC
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from ..core.errors import DataError, format_shape, list_first
from .adaptation import AdaptableTask, AdaptedTaskConfig
from .classes import compute_binary_metrics
from .data import bids
from .data.augmentation import Augmentation
from .data.bids import CaseFiles
from .data.cases import CaseSettings, load_cases
from .data.nifti import check_voxels, read_nifti, read_values
from .models import ModelConfig, require_input
from .models.shapes import Volume
from .task import Cohort, Examples, Metric, SiteData

Normalization = Literal["volume", "brain", "brain_first"]
_IQR_OF_NORMAL = 1.349
"""Interquartile range of a normal distribution in units of its standard deviation."""


def build_preprocessing(downsample: int, normalization: Normalization = "volume") -> Callable[[np.ndarray], Tensor]:
    """Return a transform from voxels ``(D, H, W)`` to a float32 tensor ``(1, d, h, w)``.

    The transform averages cubes of ``downsample`` voxels per side and drops the remainder at the end of each axis.

    Args:
        downsample: voxels per side of a cube.
        normalization: ``volume`` z-scores each volume by its own mean and standard deviation (FedSparsify, section 4);
            ``brain`` is :func:`normalize_brain` after the averaging; ``brain_first`` before it, so that a cube at the
            edge of the brain does not depend on how much background it contains.
    """
    pool = nn.AvgPool3d(downsample)
    steps: dict[Normalization, tuple[Callable[[Tensor], Tensor], ...]] = {
        "volume": (pool, standardize),
        "brain": (pool, normalize_brain),
        "brain_first": (normalize_brain, pool),
    }

    def preprocess(voxels: np.ndarray) -> Tensor:
        return reduce(lambda volume, step: step(volume), steps[normalization], torch.from_numpy(voxels)[None])

    return preprocess


def standardize(volume: Tensor) -> Tensor:
    """Return a volume with mean 0 and standard deviation 1; one whose values are all equal becomes 0."""
    return (volume - volume.mean().item()) / (volume.std(correction=0).item() or 1.0)


def normalize_brain(volume: Tensor) -> Tensor:
    """Return a volume with median 0 and robust standard deviation 1 inside the brain, and 0 outside.

    The brain is where a volume, from which everything else was removed, is not 0. Neither background nor a few bright
    vessels change the scale, as they do that of a z-score of the whole volume.

    Args:
        volume: float32, any shape; a volume without values other than 0 stays as it is.
    """
    brain = volume != 0
    values = volume[brain].double()
    if not values.numel():
        return volume
    lower, median, upper = np.quantile(values.numpy(), [0.25, 0.5, 0.75])
    # A quantised volume may have equal quartiles.
    scale = (upper - lower) / _IQR_OF_NORMAL or float(values.std(correction=0)) or 1.0
    return torch.where(brain, (volume - float(median)) / scale, 0.0)


def read_voxels(file: Path, shape: Sequence[int], spacing: Sequence[float] | None = None) -> np.ndarray:
    """Read the voxels of a NIfTI file: float32 ``shape``, in RAS+ orientation.

    Args:
        file: ``.nii`` or ``.nii.gz``.
        shape: expected shape of the voxels.
        spacing: expected size of the voxels in mm; None: any size from 0.1 to 20.

    Raises:
        DataError: the file is missing, damaged, or of another shape or spacing; its affine is unusable; or its voxels
            are not finite, too large or all equal.
    """
    image = read_nifti(file, shape, spacing)
    voxels = read_values(file, image).reshape(image.shape[:3])
    if voxels.shape != tuple(shape):
        raise DataError(
            f"wrong shape {format_shape(voxels.shape)} of {file.name} in RAS orientation; expected "
            f"{format_shape(shape)}: set task.shape, or reorient this one"
        )
    check_voxels(file, voxels)
    return voxels


class BrainConfig(CaseSettings, AdaptedTaskConfig):
    """Preprocessing of the volumes, and the network."""

    model: Annotated[ModelConfig, require_input("volume")] = ModelConfig(name="brain_age_cnn_3mm")
    """network and its settings"""
    shape: Volume = (52, 64, 52)
    """voxels per axis of every volume on disk, in RAS orientation"""
    spacing: tuple[float, float, float] | None = None
    """size of a voxel on disk in mm per axis, within 2 %; null: not checked"""
    downsample: int = Field(2, ge=1, le=16)
    """an input voxel is the mean of a cube of this many voxels per side"""
    normalization: Normalization = "volume"
    """volume: z-score of all voxels; brain: median and quartiles inside the brain, 0 outside; brain_first: the same,
    before the downsampling; the latter two for volumes that hold the brain alone"""
    augmentation: Augmentation = Field(default_factory=Augmentation)
    """random changes of the training inputs; none by default"""
    derivative: bids.DerivativeName | None = None
    """folder in derivatives/ whose T1w images are read, such as fmriprep; null: the data set's own"""

    @model_validator(mode="after")
    def _check_downsample(self) -> Self:
        if min(self.shape) < self.downsample:
            raise ValueError(f"downsample {self.downsample} is larger than a side of shape {list(self.shape)}")
        return self

    @property
    def volume(self) -> tuple[int, ...]:
        """Voxels of an input: (depth, height, width)."""
        return tuple(side // self.downsample for side in self.shape)


class BrainTask(AdaptableTask, ABC):
    """Prediction of one number, the target, from volumes ``(B, 1, depth, height, width)``.

    Attributes:
        target: what is predicted for a subject.
    """

    config: BrainConfig
    target: ClassVar[Literal["age", "sex"]]
    reads = (
        "a BIDS data set, or a folder of several: participants.tsv with age or sex (F or 0, M or 1), and "
        "sub-*/[ses-*/]anat/*_T1w.nii.gz; a session is an example of its subject"
    )

    def build_network(self) -> nn.Module:
        """Return the configured network with one output."""
        return self.config.model.build(volume=self.config.volume, outputs=1)

    def cohort(self, path: Path) -> Cohort:
        """Return the participants with all their columns, including ``site`` if the data names sites."""
        return bids.read_cohort(path, self.config.derivative)

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read and check every subject once."""
        config, subjects = self.config, bids.read_subjects(data.path, self.config.derivative)
        preprocess = build_preprocessing(config.downsample, config.normalization)

        def read_example(subject: CaseFiles) -> tuple[Tensor, Tensor]:
            target = torch.tensor([subject.parse_age() if self.target == "age" else subject.parse_sex()])
            return preprocess(read_voxels(subject.require_images()[0], config.shape, config.spacing)), target

        used, warnings = set(data.select(subjects, lambda name: subjects[name].subject)), []
        # The subjects of a simulated site are chosen from the rows.
        if unlisted := sorted(s.subject for name, s in subjects.items() if name not in used and not s.is_listed):
            warnings.append(f"{len(unlisted)} {bids.NO_ROW}: {list_first(unlisted, 3)}")
        if others := [file.name for name, s in subjects.items() if name in used for file in s.others]:
            warnings.append(f"{len(others)} further runs of T1w images are left out: {list_first(others, 3)}")
        return load_cases(config, data, seed, subjects, read_example, warnings=warnings)

    def augment(self, batch: Any, generator: torch.Generator) -> Any:
        """Return the minibatch with changed volumes; the first axis of a volume in RAS is left to right."""
        volumes, targets = batch
        return self.config.augmentation.apply(volumes, generator, mirrored_axis=0)[0], targets


class BrainAgeConfig(BrainConfig):
    """The age is standardised by constants, so that no site has to reveal its own statistics."""

    age_mean: float = Field(45.0, ge=0, le=120)
    """age in years that the output 0 stands for"""
    age_scale: float = Field(15.0, gt=0, le=120)
    """years per unit of the network's output"""
    loss: Literal["smooth_l1", "mse"] = "smooth_l1"
    """loss of the standardised age; FedSparsify uses mse"""


class BrainAge(BrainTask):
    """Age in years from a T1-weighted volume; the network's output is the standardised age."""

    Config = BrainAgeConfig
    config: BrainAgeConfig
    target = "age"
    metric = Metric("mae", "years", "min")
    kind = "regression"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the smooth L1 or the squared error of the standardised age, a scalar."""
        inputs, years = batch
        targets = (years - self.config.age_mean) / self.config.age_scale
        compute_error = functional.smooth_l1_loss if self.config.loss == "smooth_l1" else functional.mse_loss
        return compute_error(model(inputs), targets)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predicted and true age in years, both ``(B, 1)``."""
        inputs, years = batch
        return model(inputs) * self.config.age_scale + self.config.age_mean, years

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return mean absolute, root mean squared and mean signed error (``bias``: predicted minus true), in years."""
        error = (predictions - targets).double()
        return {
            "mae": error.abs().mean().item(),
            "rmse": torch.sqrt((error**2).mean()).item(),
            "bias": error.mean().item(),
        }


class SexClassification(BrainTask):
    """Sex (1: male) from a T1-weighted volume, by one logit (NeuroSFL, section 4.2)."""

    Config = BrainConfig
    target = "sex"
    metric = Metric("accuracy", "", "max")
    kind = "binary"

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the binary cross-entropy, a scalar."""
        inputs, classes = batch
        return functional.binary_cross_entropy_with_logits(model(inputs), classes)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the probability of class 1 and the true class, both ``(B, 1)``."""
        inputs, classes = batch
        return torch.sigmoid(model(inputs)), classes

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of :func:`compute_binary_metrics`."""
        return compute_binary_metrics(predictions.flatten(), targets.flatten())
