"""Brain phantoms as a BIDS data set: synthetic T1-weighted volumes whose anatomy changes with age and sex.

They make every job runnable without patient data. Results on phantoms do not carry over to real brains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np

from ...core.errors import DataError
from .anatomy import VOXEL_MM, Person, render_labels, render_volume

SHAPE = (52, 64, 52)
AGES = (20.0, 80.0)


@dataclass(frozen=True)
class Scanner:
    """Effects of a site's scanner on every volume, and the ages of the site's subjects.

    Attributes:
        gain: exponent applied to the intensities (contrast).
        smoothing: share of a voxel taken from its two neighbours along each axis, 0 to 0.5.
        noise: standard deviation relative to white matter.
        shading: relative change of intensity from the middle to the end of each axis, ``(3,)``.
        ages: youngest and oldest age of the site's subjects in years.
    """

    gain: float
    smoothing: float
    noise: float
    shading: np.ndarray
    ages: tuple[float, float]

    @classmethod
    def sample(cls, rng: np.random.Generator) -> Scanner:
        """Sample a scanner and the age range of its subjects."""
        return cls(
            gain=rng.uniform(0.85, 1.2),
            smoothing=rng.uniform(0.0, 0.3),
            noise=rng.uniform(0.02, 0.06),
            shading=rng.uniform(-0.1, 0.1, 3),
            ages=(AGES[0] + rng.uniform(0, 10), AGES[1] - rng.uniform(0, 10)),
        )

    def scan(self, volume: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the volume as this scanner stores it: uint8, 0 to 255, white matter near 200."""
        for axis in range(3):
            sides = np.roll(volume, 1, axis)
            sides += np.roll(volume, -1, axis)
            sides *= 0.5 * self.smoothing
            volume = (1 - self.smoothing) * volume
            volume += sides
        # Plane by plane: the allocator hands large temporary arrays back at each step, which takes most of the time.
        planes = zip(volume, self._compute_shading(volume.shape), strict=True)
        return np.stack([self._digitize(plane, shade, rng) for plane, shade in planes])

    def _digitize(self, plane: np.ndarray, shade: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        noise = rng.normal(0.0, self.noise, plane.shape)
        intensity = np.abs(np.clip(plane, 0, None) ** self.gain * shade + noise * (plane > 0.01))
        return np.asarray(np.clip(np.rint(200.0 * intensity), 0, 255).astype(np.uint8))

    def _compute_shading(self, shape: Sequence[int]) -> np.ndarray:
        """Return the factor by which shading changes each voxel's intensity."""
        a, b, c = (s * np.linspace(-1, 1, side) for s, side in zip(self.shading, shape, strict=True))
        return np.asarray(1.0 + a[:, None, None] + b[:, None] + c)


def write_phantoms(
    out: Path, sites: int, subjects: int, seed: int, shape: Sequence[int] = SHAPE, *, labels: bool = False
) -> Path:
    """Write a BIDS data set of phantoms with the natural sites ``site-1``, ``site-2``, ...

    A subject depends only on the seed, the number of its site and its own number. Adding sites or subjects does not
    change the others.

    Args:
        out: folder to write to; created if missing.
        sites: number of sites, 1 to 99.
        subjects: brains per site, 1 to 999.
        seed: seed of all randomness.
        shape: shape of the volumes in voxels of 3 mm.
        labels: also write the map of the tissues, ``derivatives/anatomy/sub-*/anat/sub-*_dseg.nii.gz``.

    Returns:
        ``out``.

    Raises:
        DataError: ``out`` is not empty, or a number is out of range.
    """
    if out.is_dir() and any(out.iterdir()):
        raise DataError(f"{out} is not empty; choose another folder, or remove it first")
    if not (1 <= sites <= 99 and 1 <= subjects <= 999):
        raise DataError(f"{sites} sites of {subjects} subjects; expected 1 to 99 sites and 1 to 999 subjects")
    out.mkdir(parents=True, exist_ok=True)
    rows = [row for site in range(1, sites + 1) for row in _write_site(out, site, subjects, seed, shape, labels=labels)]
    header = "participant_id\tage\tsex\tsite\n"
    (out / "participants.tsv").write_text(header + "".join("\t".join(row) + "\n" for row in rows))
    description = {"Name": "Brain phantoms", "BIDSVersion": "1.9.0", "DatasetType": "raw", "License": "CC0"}
    (out / "dataset_description.json").write_text(json.dumps(description, indent=2) + "\n")
    return out


def _write_site(
    out: Path, site: int, subjects: int, seed: int, shape: Sequence[int], *, labels: bool
) -> list[tuple[str, str, str, str]]:
    scanner = Scanner.sample(np.random.default_rng([seed, site]))
    rows = []
    for number in range(1, subjects + 1):
        rng = np.random.default_rng([seed, site, number])
        name, sex = f"sub-{site:02d}{number:03d}", "MF"[number % 2]
        age = round(rng.uniform(*scanner.ages), 1)
        person = Person.sample(age, sex, rng)
        _save_nifti(out / name / "anat" / f"{name}_T1w.nii.gz", scanner.scan(render_volume(person, shape), rng))
        if labels:
            anatomy = out / "derivatives" / "anatomy" / name / "anat"
            _save_nifti(anatomy / f"{name}_dseg.nii.gz", render_labels(person, shape))
        rows.append((name, f"{age}", sex, f"site-{site}"))
    return rows


def _save_nifti(file: Path, voxels: np.ndarray) -> None:
    """Write a NIfTI file in RAS+ orientation with 3 mm voxels and the origin at the centre."""
    affine = np.diag([VOXEL_MM, VOXEL_MM, VOXEL_MM, 1.0])
    affine[:3, 3] = [-(side - 1) * VOXEL_MM / 2 for side in voxels.shape]
    file.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(voxels, affine), file)
