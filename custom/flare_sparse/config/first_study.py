"""First studies that ``flare-sparse init --data`` writes, of a table, of images, of nnU-Net: each choice is said."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import ConfigError, DataError, format_shape, list_first
from ..tasks.data import bids
from ..tasks.data.bids import CaseFiles
from ..tasks.data.cases import find_cases
from ..tasks.data.nifti import read_nifti
from ..tasks.data.phantom import write_phantoms
from ..tasks.data.tables import Spelling, Table, read_table
from ..tasks.nnunet.fingerprint import fingerprint_folders
from ..tasks.nnunet.plan import build_plan, list_configurations
from ..tasks.nnunet.raw import DATASET
from ..tasks.task import Cohort
from .yaml_files import CONFIGURATIONS, STARTERS, format_yaml, read_yaml

SITE_NAMES = ("hospital", "site", "center", "centre", "clinic", "region", "institution", "ward", "klinik", "zentrum")
TARGET_NAMES = ("target", "outcome", "label", "died", "death", "event", "readmitted", "diagnosis", "tod", "y")
ID_NAMES = ("id", "patient", "patient_id", "subject", "subject_id", "participant_id", "case")
NEGATIVES = ("no", "nein", "non", "n", "false", "negative", "neg", "none", "control", "healthy", "alive", "absent")
"""Labels of the absence of what is predicted: of two labels, the other one is class 1."""
DECAY, TRAINED = 0.3, 0.7
"""Weight decay of a table with as many inputs as training rows, and the share of the rows that train
(docs/results/tables.md)."""
MOST_LABELS = 12
"""A column of text with more different values is no category: it is left out, and named."""
Changes = tuple[Mapping[str, Any], Mapping[str, Any], list[str]]
"""The sections ``task`` and ``simulator`` of a study, and what was inferred, in sentences."""


def write_study(kind: str, data: Path | None, out: Path) -> list[str]:
    """Write ``study.yaml`` for data at hand: the starter of its kind, with what the data says.

    Args:
        kind: ``table``; ``brain_age``, of a BIDS data set; ``segmentation``, of any data set that the task reads; or
            ``nnunet``, of a raw data set (``imagesTr``, ``labelsTr``, ``dataset.json``), dealt out to two sites, or of
            a folder of such data sets, ``site-1``, ``site-2``, ...
        data: a file, a data set, or a folder of several, which are the sites; None, for ``nnunet``: phantoms.
        out: folder to write to; of data that cannot be read, nothing is written.

    Returns:
        What was inferred, in sentences.

    Raises:
        ConfigError: the folder holds no data set of nnU-Net.
        DataError: the data cannot be read, or makes no study.
    """
    study = read_yaml(CONFIGURATIONS / STARTERS[kind][0])
    if kind == "table":
        assert data is not None, "a table is given"
        task, simulator, notes = _look_at_table(data, study["task"], study["method"]["training"])
    elif kind == "nnunet":
        task, simulator, notes = _plan(data, out, study["method"]["training"])
    else:
        assert data is not None, "images are given"
        task, simulator, notes = (_look_at_brains if kind == "brain_age" else _look_at_cases)(data)
        task = {**study["task"], **task}
    # The quorum of the package's own job is that of its four sites.
    study.pop("federation", None)
    study |= {"name": "study", "task": task, "simulator": simulator}
    name = "phantoms" if data is None else data.name
    header = "".join(f"# {note}\n" for note in (f"Written from {name}. Correct what is wrong:", *notes))
    out.mkdir(parents=True, exist_ok=True)
    (out / "study.yaml").write_text(header + format_yaml(study), encoding="utf-8")
    return notes


def _locate(path: Path, site: str | None = None, *, named: bool = False) -> dict[str, Any]:
    """Return where simulated sites have their data: those that a column or folders name, or three at random."""
    if site or named:
        partition = {"kind": "natural"} | ({"column": site} if site else {})
        return {"data": {"path": str(path.resolve()), "partition": partition}}
    return {"sites": 3, "data": {"path": str(path.resolve()), "partition": {"kind": "iid"}}}


def _look_at_table(path: Path, starter: Mapping[str, Any], training: dict[str, Any]) -> Changes:
    """Look at a table; the weight decay of its training follows from its size.

    The target is the column with a usual name, or the last one; the sites are those of a column with a usual name, or
    three at random.
    """
    table = _find_decimal(read_table(path))
    names = list(table.columns)
    site, identifier = _find(names, SITE_NAMES), _find(names, ID_NAMES)
    rest = [name for name in names if name not in (site, identifier)]
    if len(rest) < 2:
        raise DataError(f"{path}: expected a target and at least one feature, found {list_first(rest, 5)}")
    target = _find(rest, TARGET_NAMES) or rest[-1]
    kind, classes = _describe_target(table, target)
    numbers, categories, left_out = _sort_features(table, [name for name in rest if name != target])
    features = [name for name in rest if name in numbers or name in categories]
    if not features:
        raise DataError(f"{path}: no column besides {target!r} has numbers or at most {MOST_LABELS} labels")
    task: dict[str, Any] = {"name": "table", "kind": kind, "target": target}
    task |= {"classes": classes} if classes else {}
    task |= {"features": features} | ({"categories": categories} if categories else {})
    has_commas = table.spelling.decimal == ","
    task |= {"decimal": ","} if has_commas else {}
    if identifier:
        ids = table.get_names(identifier)
        task["id" if len(set(ids)) == len(ids) else "group"] = identifier
    task |= {name: starter[name] for name in ("missing", "scaling", "clip", "model", "split")}
    task |= {"target_scale": _describe_scale(table, target)} if kind == "regression" else {}
    inputs = sum(len(categories.get(name, [name])) for name in features)
    training["weight_decay"] = float(f"{DECAY * inputs / (TRAINED * table.rows):.2g}")
    notes = [
        f"{table.rows} rows; target {target}: {kind}" + (f" of {', '.join(classes)}" if classes else ""),
        *([f"what is predicted, class 1: {target} {classes[1]}"] if kind == "binary" and classes else []),
        f"sites: column {site}" if site else "sites: no column with a usual name, so three at random",
        f"{len(features)} features, {len(categories)} of them categories" + "; decimal commas" * has_commas,
        *([f"left out, neither numbers nor few labels: {list_first(left_out, 5)}"] if left_out else []),
    ]
    return task, _locate(path, site), notes


def _find_decimal(table: Table) -> Table:
    """Return the table with the decimal mark by which more of its columns are numbers; a point, if none."""
    tables = table, replace(table, spelling=Spelling(decimal=","), _numbers={})
    return min(tables, key=lambda spelled: sum(map(spelled.is_text, spelled.columns)))


def _find(names: list[str], usual: tuple[str, ...]) -> str | None:
    return next((name for name in names if name.lower() in usual), None)


def _list_labels(table: Table, name: str) -> list[str]:
    return sorted({label for label in table.get_names(name) if label})


def _describe_target(table: Table, name: str) -> tuple[str, list[str]]:
    """Return the kind of a target, and its labels where these are text."""
    if table.is_text(name):
        labels = _list_labels(table, name)
        if not 2 <= len(labels) <= MOST_LABELS:
            raise DataError(
                f"target {name!r}: expected numbers or 2 to {MOST_LABELS} labels, found {len(labels)} labels. Name the "
                f"target's column as one of {', '.join(TARGET_NAMES)}, or make it the last one"
            )
        labels.sort(key=lambda label: label.lower() not in NEGATIVES)
        return ("binary" if len(labels) == 2 else "classes"), labels
    return ("binary" if set(table.get_numbers(name).tolist()) <= {0.0, 1.0} else "regression"), []


def _describe_scale(table: Table, name: str) -> list[float]:
    """Return mean and standard deviation of a column, to three digits."""
    numbers = table.get_numbers(name)
    return [float(f"{value:.3g}") for value in (np.nanmean(numbers), np.nanstd(numbers) or 1.0)]


def _sort_features(table: Table, names: list[str]) -> tuple[set[str], dict[str, list[str]], list[str]]:
    """Return the columns of numbers, the labels of each category, and the columns that are neither."""
    numbers: set[str] = set()
    categories: dict[str, list[str]] = {}
    left_out = []
    for name in names:
        labels = _list_labels(table, name) if table.is_text(name) else []
        if not labels and not table.find_date(name):
            numbers.add(name)
        elif 2 <= len(labels) <= MOST_LABELS:
            categories[name] = labels
        else:
            left_out.append(name)
    return numbers, categories, left_out


LOOKED_AT = 20
"""Volumes that are read, spread over the data set."""
INPUT_SIDE = 32
"""Longest side of a network's input that volumes are averaged to, as in the package's own job."""
MOST_CLASSES = 100


def _look_at_brains(path: Path) -> Changes:
    cohort = bids.read_cohort(path)
    files = [file for subject in bids.read_subjects(path).values() for file in subject.images]
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
    return task, *_find_sites(path, cohort, notes)


def _look_at_cases(path: Path) -> Changes:
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
    return task, *_find_sites(path, bids.index_cases(cases), notes)


def _spread(items: Sequence[Any]) -> list[Any]:
    """Return at most ``LOOKED_AT`` items, spread over all."""
    return list(items[:: -(-len(items) // LOOKED_AT) or 1])


def _choose(images: Sequence[Any], measure: Any) -> tuple[tuple[Any, ...], int]:
    """Return the commonest measure of some images, and how many there are."""
    found = [measure(image) for image in images]
    return max(found, key=found.count), len(set(found))


def _find_sites(path: Path, cohort: Cohort, notes: list[str]) -> tuple[Mapping[str, Any], list[str]]:
    sites = set(map(str, cohort.columns.get("site", ())))
    if len(sites) > 1:
        notes.append(f"sites: {len(sites)}, of the column site or the folders")
    else:
        notes.append("sites: neither a column site nor several folders, so three at random")
    return _locate(path, named=len(sites) > 1), notes


SUBJECTS = 5
"""Phantoms of a site."""


def _plan(data: Path | None, out: Path, training: dict[str, Any]) -> Changes:
    """Write ``plan.json``, and without data also two sites of phantoms; the plan chooses the batch size."""
    folders = [_write_phantoms(out / "data" / f"site-{n}", n) for n in (1, 2)] if data is None else find_data_sets(data)
    merged = fingerprint_folders(folders)
    plan = build_plan(merged, "Dataset001_Federation")
    configuration = next(name for name in ("3d_fullres", "2d") if name in list_configurations(plan))
    entry = plan["plans"]["configurations"][configuration]
    training["batch_size"] = entry["batch_size"]
    located: dict[str, Any] = {"path": "data/{site}" if data is None else str(data.absolute() / "{site}")}
    if data is not None and folders == [data]:
        located = {"path": str(data.absolute()), "partition": {"kind": "iid"}}
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")
    notes = [
        f"plan of {merged.cases} cases: {configuration}, patch {entry['patch_size']}, batch size {entry['batch_size']}",
        "rounds and epochs are small, for a first run: nnU-Net trains 1,000 epochs of 250 minibatches",
    ]
    task = {"name": "nnunet", "plan": "plan.json", "configuration": configuration}
    return task, {"sites": max(len(folders), 2), "data": located}, notes


def find_data_sets(data: Path) -> list[Path]:
    """Return the data sets in a folder: itself, or one for each site.

    Raises:
        ConfigError: there is none.
    """
    if (data / DATASET).is_file():
        return [data]
    found = sorted(file.parent for file in data.glob(f"*/{DATASET}"))
    if not found:
        raise ConfigError(f"--data {data}: expected nnU-Net's {DATASET} in it, or in a folder for each site")
    if wrong := [folder.name for folder in found if not folder.name.startswith("site-")]:
        raise ConfigError(f"--data {data}: expected folders site-1, site-2, ...; found {', '.join(wrong)}")
    return found


def _write_phantoms(folder: Path, seed: int) -> Path:
    """Write one site of phantoms in BIDS, with the ``dataset.json`` that names channels and labels."""
    write_phantoms(folder, 1, SUBJECTS, seed, labels=True)
    shutil.copyfile(CONFIGURATIONS / "starters" / "nnunet" / DATASET, folder / DATASET)
    return folder
