"""Brain phantoms as a BIDS data set: synthetic T1-weighted volumes whose anatomy changes with age and sex.

They make every job runnable without patient data. Results on phantoms do not carry over to real brains.

Anatomy of brain phantoms: synthetic T1-weighted volumes determined by age, sex and individual variation.

The effects follow what is known about ageing in general, not one cohort: the ventricles widen, faster after 50; the
cortex thins; the sulci open; the contrast of grey and white matter falls; white matter grows less uniform. Men's brains
are larger on average.

A linear model reads ventricles, cortex and contrast from the voxels, but not the texture of the white matter: bright
and dark spots lie elsewhere in each brain, so that they change no voxel's mean. A network reads their strength.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import nibabel as nib
import numpy as np

from ...core.errors import DataError

VOXEL_MM = 3.0
CSF, GREY, WHITE = 0.18, 0.62, 1.0
AGE_SPREAD_YEARS = (12.0, 12.0, 16.0, 2.0)
"""Standard deviation of the apparent ages of ventricles, cortex, contrast and texture."""
MEAN_RADIUS = {"M": 1.025, "F": 0.975}


@dataclass(frozen=True)
class Person:
    """Parameters of one person's brain.

    Attributes:
        ventricles: apparent age of the ventricles in years. The four apparent ages scatter independently around the
            true age, so that no single feature determines it.
        cortex: apparent age of the cortex in years.
        contrast: apparent age of the tissue contrast in years.
        texture: apparent age of the white matter's texture in years.
        radius: radius of the brain relative to the average.
        stretch: relative lengths of the axes, ``(3,)``.
        phase: phase of the folding pattern in radians, ``(3,)``.
        spots: phase of the pattern of spots in the white matter in radians, ``(3,)``.
    """

    ventricles: float
    cortex: float
    contrast: float
    texture: float
    radius: float
    stretch: np.ndarray
    phase: np.ndarray
    spots: np.ndarray

    @classmethod
    def sample(cls, age: float, sex: str, rng: np.random.Generator) -> Person:
        """Sample a person of ``age`` years and ``sex`` ``"M"`` or ``"F"``."""
        ventricles, cortex, contrast, texture = age + rng.normal(0.0, AGE_SPREAD_YEARS)
        radius = MEAN_RADIUS[sex] + rng.normal(0.0, 0.02)
        stretch = rng.normal(1.0, 0.01, 3)
        phase = rng.uniform(-0.6, 0.6, 3)
        spots = rng.uniform(-np.pi, np.pi, 3)
        return cls(ventricles, cortex, contrast, texture, radius, stretch, phase, spots)


def render_volume(person: Person, shape: Sequence[int]) -> np.ndarray:
    """Return a person's volume without scanner effects.

    Returns:
        float32 ``shape``; 0 outside the brain, white matter near 1.
    """
    axes = _compute_axes(tuple(shape))
    csf, grey, matter, ventricles = _compute_tissues(person, axes)
    white = WHITE - 0.0022 * (person.contrast - 20.0)
    volume = csf * CSF
    volume += grey * (GREY - CSF)
    volume += matter * (white - GREY + _compute_spots(person, axes))
    volume += ventricles * (CSF - volume)
    return volume


def _compute_spots(person: Person, axes: Sequence[np.ndarray]) -> np.ndarray:
    """Return what bright and dark spots 12 mm wide, of a strength that grows with age, add to white matter."""
    x, y, z = (np.sin(0.26 * axis + phase) for axis, phase in zip(axes, person.spots, strict=True))
    return np.asarray(0.012 * max(person.texture - 20.0, 0.0) * x * y * z, dtype=np.float32)


def render_labels(person: Person, shape: Sequence[int]) -> np.ndarray:
    """Return the tissue of each voxel, uint8 ``shape``: 1 grey matter, 2 white matter, 3 ventricles, 0 all else."""
    _, grey, matter, ventricles = _compute_tissues(person, _compute_axes(tuple(shape)))
    labels = np.zeros(tuple(shape), dtype=np.uint8)
    for number, tissue in enumerate((grey, matter, ventricles), start=1):
        labels[tissue > 0.5] = number
    return labels


def _compute_tissues(person: Person, axes: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the share of each voxel inside the brain, inside the cortex, in white matter, and in the ventricles.

    The first three contain each other.
    """
    x, y, z = (axis / s for axis, s in zip(axes, person.stretch, strict=True))
    edge = 0.75 * VOXEL_MM
    half_width, half_length, half_height = (mm * person.radius for mm in (66.0, 82.0, 62.0))
    distance = np.sqrt((x / half_width) ** 2 + (y / half_length) ** 2 + (z / half_height) ** 2)
    depth = (1.0 - distance) * half_height
    folds = _compute_folds(x, y, z, person)
    years = person.cortex - 20.0
    sulci = (0.8 + 0.035 * years) * (1.0 + 2.0 * folds)
    cortex = 8.0 - 0.05 * years + 4.0 * folds
    nested = (_blend_edge(signed_mm, edge) for signed_mm in (depth, depth - sulci, depth - sulci - cortex))
    return *nested, _compute_ventricles(x, y, z, person, edge)


def _compute_ventricles(x: np.ndarray, y: np.ndarray, z: np.ndarray, person: Person, edge: float) -> np.ndarray:
    """Return the share of each voxel in the two lateral ventricles and the third ventricle."""
    years = max(person.ventricles - 20.0, 0.0)
    growth = 1.0 + 0.008 * years + 0.0002 * years**2
    wide, long, high = 4.5 * growth, 24.0 * growth**0.5, 9.0 * growth**0.7
    lateral = np.sqrt(((np.abs(x) - 5.0 - wide) / wide) ** 2 + ((y + 4.0) / long) ** 2 + ((z - 6.0) / high) ** 2)
    third = np.sqrt((x / (2.0 * growth)) ** 2 + ((y + 4.0) / 12.0) ** 2 + ((z + 8.0) / 9.0) ** 2)
    lateral_share, third_share = (
        _blend_edge((1.0 - lateral) * wide, edge),
        _blend_edge((1.0 - third) * 2.0 * growth, edge),
    )
    return np.asarray(np.maximum(lateral_share, third_share))


def _compute_folds(x: np.ndarray, y: np.ndarray, z: np.ndarray, person: Person) -> np.ndarray:
    """Return a folding pattern between -1 and 1 with wavelengths of 18 to 25 mm."""
    a, b, c = person.phase
    waves = np.sin(0.30 * x + a) * np.cos(0.25 * y + b) + np.sin(0.28 * z + c) * np.cos(0.35 * y - a)
    return np.asarray(0.5 * waves, dtype=np.float32)


def _blend_edge(signed_mm: np.ndarray, edge: float) -> np.ndarray:
    """Return 0 outside a surface, 1 inside it, and the partial volume of a voxel at the surface."""
    return np.clip(signed_mm / (2.0 * edge) + 0.5, 0.0, 1.0)


@cache
def _compute_axes(shape: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    """Return the distances from the centre along each axis in mm: float32, broadcastable."""
    lines = (np.arange(side, dtype=np.float32) * VOXEL_MM - (side - 1) * VOXEL_MM / 2 for side in shape)
    return tuple(np.meshgrid(*lines, indexing="ij", sparse=True))


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
        noise = rng.normal(0.0, self.noise, volume.shape)
        intensity = np.abs(
            np.clip(volume, 0, None) ** self.gain * self._compute_shading(volume.shape) + noise * (volume > 0.01)
        )
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
