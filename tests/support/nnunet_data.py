"""Small data sets in nnU-Net's raw layout, and a plan with a small network."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from skips import require

SHAPE = (16, 20, 12)
DATASET = {
    "channel_names": {"0": "MRI"},
    "labels": {"background": 0, "front": 1, "back": 2},
    "file_ending": ".nii.gz",
}


def require_nnunet() -> None:
    """Skip where nnU-Net is not installed."""
    require(find_spec("nnunetv2") is not None, "nnU-Net is needed: pip install -c constraints.txt '.[nnunet]'")


def write_case(folder: Path, name: str, seed: int, affine: np.ndarray | None = None) -> Path:
    """Write an image with two bright boxes and its label map; return the image's file."""
    rng = np.random.default_rng(seed)
    labels = np.zeros(SHAPE, np.uint8)
    x, y, z = (int(rng.integers(2, 5)) for _ in range(3))
    labels[x : x + 6, y : y + 5, z : z + 5] = 1
    labels[x : x + 6, y + 5 : y + 10, z : z + 5] = 2
    image = rng.normal(100, 5, SHAPE) + 80.0 * (labels == 1) + 160.0 * (labels == 2)
    affine = np.eye(4) if affine is None else affine
    files = (folder / "imagesTr" / f"{name}_0000.nii.gz", folder / "labelsTr" / f"{name}.nii.gz")
    for file, voxels in zip(files, (image.astype(np.float32), labels), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(voxels, affine), file)
    return files[0]


def write_raw(folder: Path, cases: int, seed: int = 0) -> Path:
    """Write a data set of some cases; return its folder."""
    for number in range(cases):
        write_case(folder, f"case{seed}{number}", 10 * seed + number)
    (folder / "dataset.json").write_text(json.dumps({**DATASET, "numTraining": cases}))
    return folder


def write_bids(folder: Path, raw: Path, suffix: str = "T1w") -> Path:
    """Copy the cases of a raw data set to BIDS, two sessions of each subject; return the folder."""
    content = json.loads((raw / "dataset.json").read_text())
    for number, image in enumerate(sorted((raw / "imagesTr").glob("*.nii.gz"))):
        place = Path(f"sub-{number // 2}", f"ses-{number % 2}", "anat")
        name = "_".join(place.parts[:2])
        labels = raw / "labelsTr" / image.name.replace("_0000", "")
        targets = (
            folder / place / f"{name}_{suffix}.nii.gz",
            folder / "derivatives/manual" / place / f"{name}_dseg.nii.gz",
        )
        for source, target in zip((image, labels), targets, strict=True):
            target.parent.mkdir(parents=True)
            shutil.copy(source, target)
    (folder / "dataset.json").write_text(json.dumps({**content, "channel_names": {"0": suffix}}))
    return folder


def shrink(plan: dict[str, Any], features: Sequence[int] = (2, 4, 4, 4, 4, 4)) -> dict[str, Any]:
    """Return a plan whose networks have few features, so that a step takes milliseconds."""
    plan = copy.deepcopy(plan)
    for configuration in plan["plans"]["configurations"].values():
        arguments = configuration["architecture"]["arch_kwargs"]
        arguments["features_per_stage"] = list(features[: arguments["n_stages"]])
    return plan
