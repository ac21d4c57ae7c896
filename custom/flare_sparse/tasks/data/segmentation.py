"""Cases of a segmentation as a network reads them: volumes of any shape, orientation and spacing, and their patches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import nibabel as nib
import numpy as np
import torch
from nibabel.affines import voxel_sizes
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional

from ...core.errors import DataError, format_shape
from ...core.settings import Settings
from ..models.shapes import Count
from .bids import CaseFiles
from .nifti import check_voxels, read_nifti, read_values, round_labels

Normalization = Literal["volume", "nonzero", "none"]
Item = tuple[Tensor, Tensor, Tensor]
"""Image ``(channels, d, h, w)``, label map ``(d, h, w)`` and size of the label map's voxels in mm ``(3,)``."""
AFFINE_TOLERANCE_MM = 0.1
"""Largest distance in mm of a label map's voxel from the image's, for images that were registered to each other."""


_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"
Label = Annotated[int, Field(ge=1, le=65_535)]
Spacing = Annotated[float, Field(ge=0.1, le=20)]


class Preparation(Settings):
    """How images and label maps become a network's inputs and targets."""

    channels: Count = 1
    """channels of an image: of all its files together"""
    spacing: tuple[Spacing, Spacing, Spacing] | None = None
    """size of the network's voxels in mm; images are resampled to it; null: as they are"""
    window: tuple[float, float] | None = None
    """clip intensities to this range first, such as [-160, 240] Hounsfield units; null: no"""
    normalization: Normalization = "volume"
    """z-score of each image's channels over the volume, or over voxels that are not 0; or none"""
    classes: dict[Annotated[str, Field(pattern=_NAME)], Label | tuple[Label, ...]] = Field(min_length=1, max_length=254)
    """values of the label maps by name of the class, {tumour: 1, oedema: [2, 4]}; 0 is background"""
    other_labels: Literal["refuse", "background"] = "refuse"
    """values of the label maps that are not in classes: refuse the case, or background"""

    @field_validator("window")
    @classmethod
    def _check_window(cls, window: tuple[float, float] | None) -> tuple[float, float] | None:
        if window is not None and window[0] >= window[1]:
            raise ValueError(f"window is {list(window)}; expected [low, high]")
        return window

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        labels = [label for labels in self.labels for label in labels]
        if repeated := sorted({label for label in labels if labels.count(label) > 1}):
            raise ValueError(f"classes: label {repeated[0]} belongs to two classes; each label belongs to one")
        return self

    @property
    def labels(self) -> list[tuple[int, ...]]:
        """Values of the label maps of each class."""
        return [(value,) if isinstance(value, int) else value for value in self.classes.values()]

    def read_image(self, files: Sequence[Path]) -> tuple[Tensor, Any]:
        """Read the image of a case.

        Returns:
            The network's input, float32 ``(channels, d, h, w)``, and the first file's image in RAS+ orientation.

        Raises:
            DataError: a file is damaged, or the channels do not fit each other or the task.
        """
        images = [read_nifti(file, None) for file in files]
        channels = [
            channel for file, image in zip(files, images, strict=True) for channel in _list_channels(file, image)
        ]
        if len(channels) != self.channels:
            raise DataError(f"{files[0].name}: channels: {len(channels)}; expected {self.channels}: set task.channels")
        for file, image in zip(files[1:], images[1:], strict=True):
            check_grid(file, image, files[0], images[0])
        volume = torch.from_numpy(np.stack(channels))
        if self.window is not None:
            volume = volume.clamp(*self.window)
        return self._normalize(self._resample(volume, voxel_sizes(images[0].affine))), images[0]

    def read_labels(self, file: Path, image_file: Path, image: Any) -> Tensor:
        """Read a label map: uint8 ``(d, h, w)`` with class 0 for background, in RAS+ orientation.

        Raises:
            DataError: the file is damaged, lies elsewhere than the image, or has a value that is no class.
        """
        found = read_nifti(file, None)
        check_grid(file, found, image_file, image)
        if len(found.shape) > 3 and found.shape[3] != 1:
            raise DataError(f"{file.name}: {format_shape(found.shape)} voxels; expected one label for each voxel")
        whole = round_labels(file, read_values(file, found).reshape(found.shape[:3]))
        classes = np.zeros(whole.shape, dtype=np.uint8)
        values = {label: number for number, labels in enumerate(self.labels, start=1) for label in labels}
        for value in np.unique(whole).astype(int).tolist():
            if value in values:
                classes[whole == value] = values[value]
            elif value and self.other_labels == "refuse":
                raise DataError(
                    f"{file.name}: label {value} is none of task.classes; add it there, or set task.other_labels: "
                    "background"
                )
        return torch.from_numpy(classes)

    def resample_labels(self, labels: Tensor, shape: Sequence[int]) -> Tensor:
        """Return a label map on the network's grid, of the nearest voxels."""
        if tuple(labels.shape) == tuple(shape):
            return labels
        return functional.interpolate(labels[None, None], size=tuple(shape), mode="nearest-exact")[0, 0]

    def _resample(self, volume: Tensor, sides: np.ndarray) -> Tensor:
        """Return a volume ``(channels, d, h, w)`` with the network's spacing; its outer faces stay where they are."""
        if self.spacing is None:
            return volume
        pairs = zip(volume.shape[1:], sides, self.spacing, strict=True)
        shape = tuple(max(round(length * float(side) / target), 1) for length, side, target in pairs)
        if shape == tuple(volume.shape[1:]):
            return volume
        return functional.interpolate(volume[None], size=shape, mode="trilinear")[0]

    def _normalize(self, volume: Tensor) -> Tensor:
        if self.normalization == "none":
            return volume
        for channel in volume:
            inside = channel != 0 if self.normalization == "nonzero" else torch.ones_like(channel, dtype=torch.bool)
            values = channel[inside].double()
            if values.numel():
                scale = float(values.std(correction=0)) or 1.0
                channel[inside] = ((values - values.mean()) / scale).float()
        return volume


def _list_channels(file: Path, image: Any) -> list[np.ndarray]:
    """Return the channels of an image, float32 ``(d, h, w)``."""
    values = read_values(file, image)
    channels = [values[..., c] for c in range(values.shape[3])] if values.ndim == 4 else [values]
    for channel in channels:
        check_voxels(file, channel)
    return channels


def check_grid(file: Path, image: Any, reference_file: Path, reference: Any, axes: int = 3) -> None:
    """Check that two images of a case have the same voxels.

    Args:
        file: file of the image, named in the error.
        image: the image in RAS+ orientation, as nibabel reads it.
        reference_file: file of the image that it must fit.
        reference: that image, likewise.
        axes: axes of a volume: 3, or 2 for plane images.

    Raises:
        DataError: shape or affine differ.
    """
    shape, expected = image.shape[:axes], reference.shape[:axes]
    if shape != expected:
        raise DataError(
            f"{file.name} is {format_shape(shape)}, {reference_file.name} is {format_shape(expected)}; expected the "
            "same grid: resample one of them"
        )
    distance = measure_distance((*shape, 1)[:3], image.affine, reference.affine)
    if distance > AFFINE_TOLERANCE_MM:
        raise DataError(
            f"{file.name} lies up to {distance:.1f} mm from {reference_file.name}; expected the same affine: resample "
            "one of them"
        )


def measure_distance(shape: Sequence[int], affine: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest distance in mm, along an axis, that two affines ``(4, 4)`` put a voxel of a volume apart.

    Args:
        shape: voxels of the volume ``(d, h, w)``.
        affine: affine of one image.
        reference: affine of the other.
    """
    corners = np.array([[i, j, k, 1] for i in (0, shape[0]) for j in (0, shape[1]) for k in (0, shape[2])])
    return float(np.abs((affine - reference) @ corners.T).max())


def check_volumes(volumes: Sequence[Path], axes: int = 3, *, canonical: bool = True, remedy: str = "") -> None:
    """Check that files are complete volumes with the voxels of the first one.

    Args:
        volumes: the files.
        axes: axes of a volume: 3, or 2 for plane images.
        canonical: the network reads volumes turned to RAS+ orientation; False: as they are stored.
        remedy: what to do about volumes that lie at the same place and are stored in different orientations.

    Raises:
        DataError: a file is missing or damaged, or lies elsewhere than the first one, or its voxels are stored in
            another order and are read so.
    """
    first, *others = volumes
    reference = read_nifti(first, None, axes=axes, canonical=canonical)
    for file in others:
        image = read_nifti(file, None, axes=axes, canonical=canonical)
        orientations = [describe_orientation(each) for each in (image, reference)]
        if not canonical and axes == 3 and orientations[0] != orientations[1]:
            raise DataError(
                f"{file.name} is stored in {orientations[0]} orientation and {first.name} in {orientations[1]}, and "
                f"voxels are read as they are stored: {remedy or 'store both alike'}"
            )
        check_grid(file, image, first, reference, axes)


def describe_orientation(image: Any) -> str:
    """Return the directions of a volume's axes, such as ``RAS``."""
    return "".join(code or "?" for code in nib.aff2axcodes(image.affine))


def write_labels(file: Path, labels: Tensor, original: Any) -> None:
    """Write a label map in RAS+ orientation as an image of the orientation, affine and header of another one.

    Args:
        file: ``.nii.gz`` file to write; its folder is created.
        labels: whole numbers ``(d, h, w)``, on the grid of ``original`` turned to RAS+.
        original: the image as it is stored.
    """
    turn = nib.orientations.ornt_transform(
        nib.orientations.axcodes2ornt(("R", "A", "S")), nib.orientations.io_orientation(original.affine)
    )
    values = nib.orientations.apply_orientation(labels.numpy(), turn)
    dtype = np.uint8 if int(labels.max()) < 256 else np.uint16
    image = type(original)(values.astype(dtype), original.affine, original.header)
    image.set_data_dtype(dtype)
    # The range of intensities for display is that of the image, in which labels would all be black.
    image.header["cal_min"], image.header["cal_max"] = 0, 0
    file.parent.mkdir(parents=True, exist_ok=True)
    nib.save(image, file)


def read_item(files: CaseFiles, preparation: Preparation, *, on_grid: bool = True) -> Item:
    """Read a case: with the label map on the network's grid, for training, or on the image's own, for evaluation.

    Raises:
        DataError: a file is missing or damaged, or the files do not fit each other.
    """
    labels_file = files.require_labels()
    image, first = preparation.read_image(files.images)
    labels = preparation.read_labels(labels_file, files.images[0], first)
    spacing = torch.from_numpy(voxel_sizes(first.affine)).float()
    return image, preparation.resample_labels(labels, image.shape[1:]) if on_grid else labels, spacing


_DRAWS = 6
"""Random numbers of a patch: whether it has a class, which one, which of its voxels, and a position along each axis."""


def sample_patch(
    image: Tensor, labels: Tensor, patch: Sequence[int], foreground: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return a random patch of an image and its labels.

    With the probability ``foreground``, a class of the volume is drawn, then one of its voxels, and the patch is
    centred on it as far as the volume allows; each class is as likely as any other. Otherwise the position is uniform.

    Args:
        image: ``(channels, d, h, w)``.
        labels: ``(d, h, w)``, 0 for background.
        patch: shape of a patch; zeros surround a volume that is smaller.
        foreground: share of the patches that are centred on a class.
        generator: source of the random numbers; every patch takes the same number of them.
    """
    has_class, which, voxel, *position = torch.rand(_DRAWS, generator=generator, dtype=torch.float64).tolist()
    centre, classes = None, labels.unique()
    classes = classes[classes != 0]
    if has_class < foreground and len(classes):
        voxels = (labels == classes[int(which * len(classes))]).nonzero()
        centre = voxels[int(voxel * len(voxels))].tolist()
    starts = []
    for axis, (length, side) in enumerate(zip(labels.shape, patch, strict=True)):
        last = max(length - side, 0)
        start = int(position[axis] * (last + 1)) if centre is None else centre[axis] - side // 2
        starts.append(min(max(start, 0), last))
    return cut_patch(image, starts, patch), cut_patch(labels, starts, patch)


def take_central_patch(image: Tensor, labels: Tensor, patch: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the patch in the middle of all labelled voxels, or of the volume if there are none."""
    voxels, starts = labels.nonzero(), []
    for axis, (length, side) in enumerate(zip(labels.shape, patch, strict=True)):
        middle = int(voxels[:, axis].min() + voxels[:, axis].max() + 1) // 2 if len(voxels) else length // 2
        starts.append(min(max(middle - side // 2, 0), max(length - side, 0)))
    return cut_patch(image, starts, patch), cut_patch(labels, starts, patch)


def cut_patch(volume: Tensor, starts: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Return a patch of the last three axes; zeros fill what the volume lacks, in equal parts on both sides.

    MONAI's sliding window fills in the same way, so that training and inference see a small volume alike.
    """
    padding: list[int] = []
    for axis, (start, side) in enumerate(zip(starts, patch, strict=True), start=-3):
        available = min(side, volume.shape[axis] - start)
        volume, missing = volume.narrow(axis, start, available), side - available
        padding = [missing // 2, missing - missing // 2, *padding]
    return functional.pad(volume, padding) if any(padding) else volume
