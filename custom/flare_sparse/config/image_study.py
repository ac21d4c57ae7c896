"""A study of images at hand: shapes, voxels, labels and sites are looked at, and each choice is said."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import DataError, list_first
from ..tasks.data import bids
from ..tasks.data.cases import CaseFiles, find_cases
from ..tasks.data.cases import read_cohort as read_case_cohort
from ..tasks.data.nifti import format_shape, read_nifti
from ..tasks.task import Cohort
from .configurations import CONFIGURATIONS, STARTERS
from .yaml_files import format_yaml, read_yaml

LOOKED_AT = 20
"""Volumes that are read, spread over the data set."""
INPUT_SIDE = 32
"""Longest side of a network's input that volumes are averaged to, as in the package's own job."""
MOST_CLASSES = 100


def describe_images(kind: str, path: Path) -> tuple[str, list[str]]:
    """Return a study of volumes as YAML, and what was inferred from them, in sentences.

    Args:
        kind: ``brain_age``, of a BIDS data set; or ``segmentation``, of any that the task reads.
        path: a data set, or a folder of several, which are the sites.

    Raises:
        DataError: there is no such data set, or no volume or label map of it can be read.
    """
    study = read_yaml(CONFIGURATIONS / STARTERS[kind][0])
    if kind == "brain_age":
        cohort, task, notes = _look_at_brains(path)
    else:
        cohort, task, notes = _look_at_cases(path)
    sites, partition = _find_sites(cohort)
    notes.append(f"sites: {sites}")
    simulator = {} if partition["kind"] == "natural" else {"sites": 3}
    study |= {
        "name": "study",
        "task": {**study["task"], **task},
        "simulator": simulator | {"data": {"path": str(path.resolve()), "partition": partition}},
    }
    # The quorum of the package's own job is that of its four sites.
    study.pop("federation", None)
    header = "".join(f"# {note}\n" for note in (f"Written from {path.name}. Correct what is wrong:", *notes))
    return header + format_yaml(study), notes


def _look_at_brains(path: Path) -> tuple[Cohort, dict[str, Any], list[str]]:
    cohort = bids.read_cohort(path)
    files = [subject.image for subject in bids.read_subjects(path).values() if subject.image is not None]
    volumes = [read_nifti(file, None) for file in _spread(files)]
    if not volumes:
        raise DataError(f"{path}: no subject has an image sub-*/anat/*_T1w.nii.gz")
    shape, shapes = _choose(volumes, lambda image: image.shape[:3])
    downsample = max(1, round(max(shape) / INPUT_SIDE))
    notes = [
        f"{len(cohort.ids)} subjects with a row, {len(files)} images; voxels {format_shape(shape)}",
        f"an input voxel is the mean of {downsample} x {downsample} x {downsample}",
    ]
    task: dict[str, Any] = {"shape": list(shape), "downsample": downsample}
    if shapes > 1:
        task["skip_bad_subjects"] = True
        notes.append(f"{shapes} shapes among {len(volumes)} images: those of others are skipped, and counted")
    ages = cohort.columns.get("age")
    if ages is None or np.isnan(ages).all():
        raise DataError(f"{path}: participants.tsv has no column age with numbers")
    if missing := int(np.isnan(ages).sum()):
        task["skip_bad_subjects"] = True
        notes.append(f"{missing} subjects without an age are skipped, and counted")
    return cohort, task, notes


def _look_at_cases(path: Path) -> tuple[Cohort, dict[str, Any], list[str]]:
    cases = find_cases(path)
    labelled = [case for case in cases.values() if not case.problem and case.labels is not None]
    looked_at: list[CaseFiles] = _spread(labelled)
    if not looked_at:
        raise DataError(f"{path}: no case has an image and a label map")
    images = [read_nifti(case.images[0], None) for case in looked_at]
    maps = [np.asanyarray(read_nifti(case.require_labels(), None).dataobj) for case in looked_at]
    values = sorted({int(value) for voxels in maps for value in np.unique(voxels)} - {0})
    if not values or len(values) > MOST_CLASSES:
        raise DataError(f"{path}: the label maps have {len(values)} values above 0; expected 1 to {MOST_CLASSES}")
    channels = len(looked_at[0].images) if len(looked_at[0].images) > 1 else (*images[0].shape, 1)[3]
    sides = np.min([image.shape[:3] for image in images], axis=0)
    # U-Nets halve a patch four times.
    patch = [int(min(64, max(16, side // 16 * 16))) for side in sides]
    spacing, spacings = _choose(images, lambda image: tuple(round(float(s), 2) for s in image.header.get_zooms()[:3]))
    task: dict[str, Any] = {"classes": {f"class_{value}": value for value in values}, "patch": patch}
    task |= {"channels": int(channels)} if channels > 1 else {}
    task |= {"spacing": list(spacing)} if spacings > 1 else {}
    notes = [
        f"{len(cases)} cases, {len(labelled)} with a label map; smallest sides {format_shape(sides.tolist())}",
        f"classes: values {list_first([str(value) for value in values], 12)} of {len(maps)} label maps; name them",
        f"patch {format_shape(patch)}" + (f", {channels} channels" if channels > 1 else ""),
    ]
    if spacings > 1:
        notes.append(f"{spacings} voxel sizes: all are resampled to the commonest, {format_shape(spacing)} mm")
    return read_case_cohort(cases), task, notes


def _spread(items: Sequence[Any]) -> list[Any]:
    """Return at most ``LOOKED_AT`` items, spread over all."""
    return list(items[:: -(-len(items) // LOOKED_AT) or 1])


def _choose(images: Sequence[Any], measure: Any) -> tuple[tuple[Any, ...], int]:
    """Return the commonest measure of some images, and how many there are."""
    found = [measure(image) for image in images]
    return max(found, key=found.count), len(set(found))


def _find_sites(cohort: Cohort) -> tuple[str, Mapping[str, Any]]:
    names = cohort.columns.get("site")
    if names is not None and len(set(map(str, names))) > 1:
        return f"{len(set(map(str, names)))}, of the column site or the folders", {"kind": "natural"}
    return "neither a column site nor several folders, so three at random", {"kind": "iid"}
