"""nnU-Net's fingerprint of a site's data, in a form that merges exactly over sites.

nnU-Net plans from the spacing and shape of every case, and from samples of the intensities in the foreground. Geometry
merges as it is. Samples are sent as a histogram whose bins are float32 numbers with 12 bits of mantissa, the same at
every site (as the relative-error sketch of Masson et al. 2019): each sample is rounded by at most
2^-13, 0.0122 %; whole numbers below 8,192, such as Hounsfield units, are exact.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from ...core.errors import ConfigError, DataError
from ...core.settings import Settings
from ..data.bids import CaseFiles
from ..data.screening import screen_subjects
from .raw import Dataset, check_alignment, explain_reader_error, find_raw_cases, read_dataset

FORMAT = 1
MANTISSA_BITS = 12
SAMPLES = 100_000_000
"""Foreground voxels that nnU-Net draws from all cases together, each case the same number."""
_LARGEST = float(np.finfo(np.float32).max)
_PERCENTILES = {"min": 0.0, "percentile_00_5": 0.5, "median": 50.0, "percentile_99_5": 99.5, "max": 100.0}
_Spacing = Annotated[float, Field(gt=0, le=1e6)]
_Side = Annotated[float, Field(ge=1, le=1e6)]
_Case = (
    tuple[tuple[_Spacing, _Spacing], tuple[_Side, _Side]]
    | tuple[tuple[_Spacing, _Spacing, _Spacing], tuple[_Side, _Side, _Side]]
)
_Share = Annotated[float, Field(gt=0, le=1)]
_Sample = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]


class Intensities(Settings):
    """Samples of one channel in the foreground of all cases of a site."""

    values: tuple[_Sample, ...] = Field(min_length=1, max_length=2_000_000)
    """bins of the histogram, ascending"""
    counts: tuple[Annotated[int, Field(ge=1)], ...] = Field(max_length=2_000_000)
    """samples in each bin"""

    @classmethod
    def join(cls, parts: Iterable[tuple[Any, Any]]) -> Self:
        """Build the histogram of some: rounded values, and samples of each."""
        values, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        bins, where = np.unique(values, return_inverse=True)
        return cls(values=tuple(bins.tolist()), counts=tuple(np.bincount(where, counts).astype(int).tolist()))

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        if len(self.values) != len(self.counts):
            raise ValueError(f"{len(self.values)} values and {len(self.counts)} counts")
        if any(below >= above for below, above in pairwise(self.values)):
            raise ValueError("values are not ascending")
        return self

    def summarize(self) -> dict[str, float]:
        """Return nnU-Net's intensity properties of the channel."""
        values, counts = np.array(self.values), np.array(self.counts, dtype=np.int64)
        mean = np.average(values, weights=counts)
        # The first and the last of the samples in each bin, between which percentiles are interpolated.
        last = counts.cumsum() - 1
        positions = np.stack([last - counts + 1, last], axis=1).flatten()
        shares = np.array(list(_PERCENTILES.values())) / 100
        percentiles = np.interp(shares * last[-1], positions, values.repeat(2))
        return {
            **dict(zip(_PERCENTILES, percentiles.tolist(), strict=True)),
            "mean": float(mean),
            "std": float(np.sqrt(np.average((values - mean) ** 2, weights=counts))),
        }


class Fingerprint(Settings):
    """What leaves a site for the plan: no name, no voxel position, no order of cases."""

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    """version of this file"""
    dataset: Dataset
    """channels, labels and file ending of dataset.json"""
    reader: str = Field(pattern=r"^[A-Za-z0-9]+$")
    """nnU-Net's class that reads the images"""
    samples_per_case: int = Field(ge=1, le=SAMPLES)
    """foreground voxels drawn from each case"""
    geometry: tuple[_Case, ...] = Field(min_length=1)
    """spacing in mm and shape after cropping of every case, sorted"""
    relative_sizes: tuple[_Share, ...] = Field(min_length=1)
    """size of every case after cropping as a share of its size before, sorted"""
    intensities: tuple[Intensities, ...]
    """one entry for each channel"""

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        if len(self.relative_sizes) != self.cases:
            raise ValueError(f"{self.cases} cases and {len(self.relative_sizes)} relative sizes")
        if len(self.intensities) != len(self.dataset.channel_names):
            raise ValueError(f"intensities of {len(self.intensities)} channels; the dataset names others")
        if any(sum(channel.counts) > self.cases * self.samples_per_case for channel in self.intensities):
            raise ValueError(f"more samples than {self.samples_per_case:,} of each case")
        return self

    @property
    def cases(self) -> int:
        """Number of cases."""
        return len(self.geometry)

    def to_nnunet(self) -> dict[str, Any]:
        """Return the content of nnU-Net's ``dataset_fingerprint.json``."""
        return {
            "spacings": [list(spacing) for spacing, _ in self.geometry],
            "shapes_after_crop": [[int(side) for side in shape] for _, shape in self.geometry],
            "foreground_intensity_properties_per_channel": {
                str(channel): part.summarize() for channel, part in enumerate(self.intensities)
            },
            "median_relative_size_after_cropping": float(np.median(self.relative_sizes)),
        }


def count_samples(total: int) -> int:
    """Return how many foreground voxels nnU-Net draws from each case, if all sites together have ``total`` cases."""
    return max(SAMPLES // total, 1)


def round_intensities(values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to 12 bits of mantissa.

    >>> round_intensities(np.float32([8191, 8193, 0.1, -3.0])).tolist()
    [8191.0, 8194.0, 0.100006103515625, -3.0]
    """
    drop = 23 - MANTISSA_BITS
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
    rounded = (bits + (1 << (drop - 1))) & ~((1 << drop) - 1)
    return rounded.astype(np.int32).view(np.float32) + np.float32(0)


def compute_fingerprint(
    folder: Path,
    samples_per_case: int,
    selected: Mapping[str, CaseFiles] | None = None,
    *,
    least: int = 1,
    skip_bad_subjects: bool = False,
) -> Fingerprint:
    """Compute the fingerprint of a raw data set with nnU-Net's own analysis of each case.

    Args:
        folder: data in nnU-Net's raw layout, or in BIDS.
        samples_per_case: foreground voxels drawn from each case.
        selected: the cases of the folder that count; None: all.
        least: fewest subjects that must have foreground, since their samples are what leaves.
        skip_bad_subjects: leave out unusable cases instead of raising.

    Raises:
        DataError: the data is missing or unusable, or fewer subjects have foreground.
    """
    dataset, cases = read_dataset(folder), find_raw_cases(folder) if selected is None else selected
    example = next((image for case in cases.values() for image in case.images), None)
    reader: Any = None if example is None else find_reader(dataset, example)

    def analyze(name: str) -> tuple[tuple[Any, Any], float, list[Any]]:
        shape, spacing, samples, _, size = _analyze_case(cases[name], reader, samples_per_case)
        if not np.isfinite(np.concatenate(samples)).all():
            raise DataError(f"{cases[name].images[0].name}: voxels are NaN or infinite")
        bins = [np.unique(round_intensities(np.asarray(values)), return_counts=True) for values in samples]
        return (tuple(map(float, spacing)), tuple(map(float, shape))), float(size), bins

    found, _ = screen_subjects(cases, analyze, skip_bad_subjects=skip_bad_subjects, source=folder)
    geometry, sizes, bins = zip(*found.values(), strict=True)
    subjects = {cases[name].subject for name, own in zip(found, bins, strict=True) if all(len(part[0]) for part in own)}
    if not subjects:
        raise DataError(f"{folder}: no label map has a voxel other than background")
    if len(subjects) < least:
        raise DataError(f"{folder}: {len(subjects)} subjects have foreground, the minimum is {least}")
    return Fingerprint(
        dataset=dataset,
        reader=reader.__name__,
        samples_per_case=samples_per_case,
        geometry=tuple(sorted(geometry)),
        relative_sizes=tuple(sorted(sizes)),
        intensities=tuple(map(Intensities.join, zip(*bins, strict=True))),
    )


def find_differences(fingerprints: Sequence[Fingerprint]) -> dict[str, int]:
    """Return what must be equal and is not, with the number of a fingerprint that differs from the first."""
    return {
        name: number
        for name in ("samples_per_case", "reader", "dataset")
        for number, other in reversed(list(enumerate(fingerprints)))
        if getattr(other, name) != getattr(fingerprints[0], name)
    }


def merge_fingerprints(fingerprints: Sequence[Fingerprint]) -> Fingerprint:
    """Return the fingerprint of all sites' cases together; it does not depend on the order of the sites.

    Raises:
        ConfigError: the sites differ in channels, labels, file ending, reader, dimensions or samples per case, or two
            fingerprints are the same.
    """
    first = fingerprints[0]
    if len(set(map(Fingerprint.model_dump_json, fingerprints))) < len(fingerprints):
        raise ConfigError("two of the fingerprints are the same; give that of each site once")
    if len({len(spacing) for part in fingerprints for spacing, _ in part.geometry}) > 1:
        raise ConfigError("some images have two dimensions and others three; nnU-Net plans one or the other")
    for name, other in find_differences(fingerprints).items():
        values = " and ".join(str(getattr(fingerprints[number], name)) for number in (0, other))
        remedy = (
            'SimpleITK refuses images whose axes are not at right angles; set "overwrite_image_reader_writer": '
            '"NibabelIO" in dataset.json at all sites, and compute all fingerprints again'
            if name == "reader"
            else "every site needs the same dataset.json (channel_names, labels, file_ending) and the same --total"
        )
        raise ConfigError(f"the fingerprints differ in {name}: {values}; {remedy}")
    return first.model_copy(
        update={
            "geometry": tuple(sorted(case for part in fingerprints for case in part.geometry)),
            "relative_sizes": tuple(sorted(size for part in fingerprints for size in part.relative_sizes)),
            "intensities": tuple(
                Intensities.join((part.values, part.counts) for part in parts)
                for parts in zip(*(part.intensities for part in fingerprints), strict=True)
            ),
        }
    )


def fingerprint_folders(folders: Sequence[Path]) -> Fingerprint:
    """Return the fingerprint of all cases in some folders of raw data.

    Raises:
        ConfigError: as :func:`merge_fingerprints`.
        DataError: a folder cannot be read.
    """
    samples = count_samples(max(sum(len(find_raw_cases(folder)) for folder in folders), 1))
    return merge_fingerprints([compute_fingerprint(folder, samples) for folder in folders])


def find_reader(dataset: Dataset, example: Path) -> Any:
    """Return nnU-Net's class that reads the images of a data set.

    Raises:
        DataError: no class reads the example.
    """
    from nnunetv2.imageio.reader_writer_registry import determine_reader_writer_from_dataset_json

    try:
        # nnU-Net prints a traceback for each reader that does not read the example, and takes the next one.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return determine_reader_writer_from_dataset_json(dataset.model_dump(), str(example), verbose=False)
    except RuntimeError as error:
        raise DataError(f"{example.name}: {error}") from error


def _analyze_case(case: CaseFiles, reader: Any, samples_per_case: int) -> Any:
    if case.problem:
        raise DataError(case.problem)
    labels = str(case.require_labels())
    check_alignment(case, reader.__name__, needs_labels=True)
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor

    # nnU-Net's readers raise errors of their libraries; analysis asserts.
    try:
        return DatasetFingerprintExtractor.analyze_case([*map(str, case.images)], labels, reader, samples_per_case)
    except Exception as error:
        text = explain_reader_error(error)
        raise DataError(f"{case.images[0].name}: nnU-Net cannot analyse the case: {text}") from error
