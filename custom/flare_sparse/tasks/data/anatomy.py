"""Anatomy of brain phantoms: synthetic T1-weighted volumes determined by age, sex and individual variation.

The effects follow what is known about ageing in general, not one cohort: the ventricles widen, faster after 50; the
cortex thins; the sulci open; the contrast of grey and white matter falls; white matter grows less uniform. Men's brains
are larger on average.

A linear model reads ventricles, cortex and contrast from the voxels, but not the texture of the white matter: bright
and dark spots lie elsewhere in each brain, so that they change no voxel's mean. A network reads their strength.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

VOXEL_MM = 3.0
CSF, GREY, WHITE = 0.18, 0.62, 1.0
TISSUES = {"grey_matter": 1, "white_matter": 2, "ventricles": 3}
"""Values of a label map by name of the tissue."""
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
    return np.concatenate([_render_slab(person, axes) for axes in _split_axes(tuple(shape))])


def _render_slab(person: Person, axes: Sequence[np.ndarray]) -> np.ndarray:
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
    """Return the tissue of each voxel, uint8 ``shape``: the number of its class in ``TISSUES``, 0 for all else."""
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


@cache
def _split_axes(shape: tuple[int, int, int]) -> list[tuple[np.ndarray, ...]]:
    """Return the axes of slabs of eight planes: the allocator hands larger temporary arrays back at each step."""
    x, y, z = _compute_axes(shape)
    return [(x[start : start + 8], y, z) for start in range(0, len(x), 8)]
