"""nnU-Net's fingerprint of a site's data, in a form that merges exactly over sites.

nnU-Net plans from the spacing and shape of every case, and from samples of the intensities in the foreground. Geometry
merges as it is. Samples are sent as a histogram whose bins are float32 numbers with 12 bits of mantissa, the same at
every site (as the relative-error sketch of Masson et al. 2019): percentiles differ from those of the samples by at most
:data:`RELATIVE_ERROR`; whole numbers below 8,192, such as Hounsfield units, are exact.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from .raw import SHARED, check_alignment, check_shared, explain_reader_error, find_raw_cases, read_dataset

FORMAT = 1
MANTISSA_BITS = 12
RELATIVE_ERROR = 2.0 ** -(MANTISSA_BITS + 1)
"""Largest relative error of a percentile of the samples: 0.0122 %."""
SAMPLES = 100_000_000
"""Foreground voxels that nnU-Net draws from all cases together, each case the same number."""
_LARGEST = float(np.finfo(np.float32).max)
_PERCENTILES = {"percentile_00_5": 0.5, "median": 50.0, "percentile_99_5": 99.5}
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

    total: float = Field(allow_inf_nan=False)
    """sum of the samples"""
    squares: float = Field(ge=0, allow_inf_nan=False)
    """sum of their squares"""
    minimum: _Sample
    """smallest sample"""
    maximum: _Sample
    """largest sample"""
    values: tuple[_Sample, ...] = Field(min_length=1, max_length=2_000_000)
    """bins of the histogram, ascending"""
    counts: tuple[Annotated[int, Field(ge=1)], ...] = Field(max_length=2_000_000)
    """samples in each bin"""

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(self.counts)

    @model_validator(mode="after")
    def _check_statistics(self) -> Self:
        if len(self.values) != len(self.counts):
            raise ValueError(f"{len(self.values)} values and {len(self.counts)} counts")
        if any(below >= above for below, above in pairwise(self.values)):
            raise ValueError("values are not ascending")
        ends = round_intensities(np.array([self.minimum, self.maximum], dtype=np.float32)).tolist()
        if [self.values[0], self.values[-1]] != ends:
            raise ValueError("minimum and maximum are not those of the values")
        mean, square = self.total / self.count, self.squares / self.count
        slack = 1e-6 * max(abs(self.minimum), abs(self.maximum))
        if not self.minimum - slack <= mean <= self.maximum + slack or square > (max(map(abs, ends)) + slack) ** 2:
            raise ValueError("total and squares are not those of numbers between minimum and maximum")
        return self


class Fingerprint(Settings):
    """What leaves a site for the plan: no name, no voxel position, no order of cases."""

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    """version of this file"""
    dataset: dict[str, Any]
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
        if unknown := set(self.dataset) - set(SHARED):
            raise ValueError(f"dataset has {len(unknown)} entries that sites do not share")
        check_shared(self.dataset)
        if len(self.relative_sizes) != self.cases:
            raise ValueError(f"{self.cases} cases and {len(self.relative_sizes)} relative sizes")
        if len(self.intensities) != len(self.dataset["channel_names"]):
            raise ValueError(f"intensities of {len(self.intensities)} channels; the dataset names others")
        if any(channel.count > self.cases * self.samples_per_case for channel in self.intensities):
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
                str(channel): _summarize(part) for channel, part in enumerate(self.intensities)
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
    dataset, cases = read_dataset(folder), list((find_raw_cases(folder) if selected is None else selected).values())
    if not cases:
        raise DataError(f"{folder}: no case is left")
    images = [image for case in cases for image in case.images]
    if not images:
        raise DataError(f"{folder}: {cases[0].subject}: {cases[0].problem}")
    reader = find_reader(dataset, images[0])
    analyze = _get_analysis(reader, samples_per_case)
    geometry, sizes = [], []
    channels: list[_Samples] = [_Samples() for _ in dataset["channel_names"]]
    subjects = set()
    for case in cases:
        try:
            shape, spacing, samples, _, size = analyze(case)
        except DataError as error:
            if skip_bad_subjects:
                continue
            raise DataError(f"{case.subject}: {error}") from error
        geometry.append((tuple(map(float, spacing)), tuple(map(float, shape))))
        sizes.append(float(size))
        if all(len(values) for values in samples):
            subjects.add(case.subject)
        for channel, values in zip(channels, samples, strict=True):
            channel.add(np.asarray(values, dtype=np.float32))
    if len(subjects) < least:
        raise DataError(f"{folder}: {len(subjects)} subjects have foreground, the minimum is {least}")
    return Fingerprint(
        dataset=dataset,
        reader=reader.__name__,
        samples_per_case=samples_per_case,
        geometry=tuple(sorted(geometry)),
        relative_sizes=tuple(sorted(sizes)),
        intensities=tuple(channel.finish() for channel in channels),
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
                _merge_intensities(parts) for parts in zip(*(f.intensities for f in fingerprints), strict=True)
            ),
        }
    )


def read_fingerprint(file: Path) -> Fingerprint:
    """Read the file that a site has sent.

    Raises:
        ConfigError: it is no fingerprint.
    """
    try:
        return parse_fingerprint(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: is no fingerprint that flare-sparse plan wrote: {error}") from error


def parse_fingerprint(text: bytes) -> Fingerprint:
    """Return the fingerprint in a JSON text, checked.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    return Fingerprint.model_validate(json.loads(text))


def find_reader(dataset: Mapping[str, Any], example: Path) -> Any:
    """Return nnU-Net's class that reads the images of a data set.

    Raises:
        DataError: no class reads the example.
    """
    from nnunetv2.imageio.reader_writer_registry import determine_reader_writer_from_dataset_json

    try:
        # nnU-Net prints a traceback for each reader that does not read the example, and takes the next one.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return determine_reader_writer_from_dataset_json(dict(dataset), str(example), verbose=False)
    except RuntimeError as error:
        raise DataError(f"{example.name}: {error}") from error


def _get_analysis(reader: Any, samples_per_case: int) -> Callable[[CaseFiles], Any]:
    from nnunetv2.experiment_planning.dataset_fingerprint.fingerprint_extractor import DatasetFingerprintExtractor

    def analyze(case: CaseFiles) -> Any:
        if case.problem:
            raise DataError(case.problem)
        labels = str(case.require_labels())
        check_alignment(case, reader.__name__, needs_labels=True)
        # nnU-Net's readers raise errors of their libraries; analysis asserts.
        try:
            return DatasetFingerprintExtractor.analyze_case([*map(str, case.images)], labels, reader, samples_per_case)
        except Exception as error:
            text = explain_reader_error(error)
            raise DataError(f"{case.images[0].name}: nnU-Net cannot analyse the case: {text}") from error

    return analyze


class _Samples:
    """Samples of one channel, added case by case."""

    def __init__(self) -> None:
        self._histogram: dict[float, int] = {}
        self._totals: list[float] = []
        self._squares: list[float] = []
        self._extremes: list[float] = []

    def add(self, values: np.ndarray) -> None:
        """Add the samples of one case; a case without foreground has none.

        Sums are kept by case and added exactly at the end, so that they do not depend on the cases' order. The
        histogram counts rounded values.
        """
        if not values.size:
            return
        exact = values.astype(np.float64)
        self._totals.append(float(exact.sum()))
        self._squares.append(float(np.square(exact).sum()))
        self._extremes += [float(values.min()), float(values.max())]
        bins, counts = np.unique(round_intensities(values), return_counts=True)
        _add_counts(self._histogram, bins.tolist(), counts.tolist())

    def finish(self) -> Intensities:
        """Return the sums and the histogram.

        Raises:
            DataError: no case has a foreground.
        """
        if not self._extremes:
            raise DataError("no label map has a voxel other than background")
        return _build_intensities(self._totals, self._squares, self._extremes, self._histogram)


def _merge_intensities(parts: Sequence[Intensities]) -> Intensities:
    histogram: dict[float, int] = {}
    for part in parts:
        _add_counts(histogram, part.values, part.counts)
    extremes = [value for part in parts for value in (part.minimum, part.maximum)]
    return _build_intensities([part.total for part in parts], [part.squares for part in parts], extremes, histogram)


def _build_intensities(
    totals: Iterable[float], squares: Iterable[float], ends: Sequence[float], histogram: Mapping[float, int]
) -> Intensities:
    values = tuple(sorted(histogram))
    return Intensities(
        # fsum: the sum of the sites' numbers does not depend on their order.
        total=math.fsum(totals),
        squares=math.fsum(squares),
        minimum=min(ends),
        maximum=max(ends),
        values=values,
        counts=tuple(histogram[value] for value in values),
    )


def _add_counts(histogram: dict[float, int], values: Iterable[float], counts: Iterable[int]) -> None:
    for value, count in zip(values, counts, strict=True):
        histogram[value] = histogram.get(value, 0) + count


def _summarize(part: Intensities) -> dict[str, float]:
    """Return nnU-Net's intensity properties of a channel."""
    counts = np.array(part.counts, dtype=np.int64)
    count = int(counts.sum())
    mean = part.total / count
    percentiles = {name: _find_percentile(part.values, counts, q) for name, q in _PERCENTILES.items()}
    return {
        "max": part.maximum,
        "mean": mean,
        "median": percentiles["median"],
        "min": part.minimum,
        "percentile_00_5": percentiles["percentile_00_5"],
        "percentile_99_5": percentiles["percentile_99_5"],
        "std": math.sqrt(max(part.squares / count - mean**2, 0.0)),
    }


def _find_percentile(values: Sequence[float], counts: np.ndarray, q: float) -> float:
    """Return the percentile of a histogram, interpolated between neighbours as ``numpy.percentile`` does."""
    ends = counts.cumsum()
    position = q / 100 * (int(ends[-1]) - 1)
    below, above = (values[int(np.searchsorted(ends, index, side="right"))] for index in (
        math.floor(position), math.ceil(position)
    ))  # fmt: skip
    return below + (above - below) * (position - math.floor(position))
