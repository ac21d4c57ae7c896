"""Anatomy of brain phantoms: how a made-up T1-weighted volume follows from age, sex and a person's own variation.

Shapes and directions of the effects follow what is known of ageing (ventricles widen faster after 50, the cortex thins,
sulci open, grey and white matter come closer in contrast; men's brains are larger on average), not any one cohort.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

VOXEL_MM = 3.0
CSF, GREY, WHITE = 0.18, 0.62, 1.0


@dataclass(frozen=True)
class Person:
    """What a volume is drawn from.

    Attributes:
        ventricles, cortex, contrast: apparent age in years of each; they scatter around the true age independently,
            so that no single sign tells the age.
        radius: of the brain relative to the average.
        stretch: relative lengths of the axes, ``(3,)``.
        phase: of the folding pattern, radians, ``(3,)``.
    """

    ventricles: float
    cortex: float
    contrast: float
    radius: float
    stretch: np.ndarray
    phase: np.ndarray

    @classmethod
    def drawn(cls, age: float, sex: str, rng: np.random.Generator) -> Person:
        """A person of ``age`` years and ``sex`` ``"M"`` or ``"F"``."""
        ventricles, cortex, contrast = age + rng.normal(0.0, (6.0, 6.0, 9.0))
        radius = (1.025 if sex == "M" else 0.975) + rng.normal(0.0, 0.02)
        stretch, phase = rng.normal(1.0, 0.01, 3), rng.uniform(-0.6, 0.6, 3)
        return cls(ventricles, cortex, contrast, radius, stretch, phase)


def draw(person: Person, shape: Sequence[int]) -> np.ndarray:
    """A person's volume without scanner effects: float32 ``shape``, 0 outside the brain, white matter near 1."""
    x, y, z = (axis / s for axis, s in zip(_axes(tuple(shape)), person.stretch, strict=True))
    edge = 0.75 * VOXEL_MM
    half_width, half_length, half_height = (mm * person.radius for mm in (66.0, 82.0, 62.0))
    distance = np.sqrt((x / half_width) ** 2 + (y / half_length) ** 2 + (z / half_height) ** 2)
    depth = (1.0 - distance) * half_height
    folds = _folds(x, y, z, person)
    years = person.cortex - 20.0
    sulci = (0.8 + 0.035 * years) * (1.0 + 2.0 * folds)
    cortex = 8.0 - 0.05 * years + 4.0 * folds
    white = WHITE - 0.0022 * (person.contrast - 20.0)
    volume = _step(depth, edge) * CSF
    volume += _step(depth - sulci, edge) * (GREY - CSF)
    volume += _step(depth - sulci - cortex, edge) * (white - GREY)
    return _with_ventricles(volume, x, y, z, person, edge)


def _with_ventricles(
    volume: np.ndarray, x: np.ndarray, y: np.ndarray, z: np.ndarray, person: Person, edge: float
) -> np.ndarray:
    """Lateral ventricles left and right, and the third between them, filled with CSF in place."""
    years = max(person.ventricles - 20.0, 0.0)
    growth = 1.0 + 0.008 * years + 0.0002 * years**2
    wide, long, high = 4.5 * growth, 24.0 * growth**0.5, 9.0 * growth**0.7
    lateral = np.sqrt(((np.abs(x) - 5.0 - wide) / wide) ** 2 + ((y + 4.0) / long) ** 2 + ((z - 6.0) / high) ** 2)
    third = np.sqrt((x / (2.0 * growth)) ** 2 + ((y + 4.0) / 12.0) ** 2 + ((z + 8.0) / 9.0) ** 2)
    inside = np.maximum(_step((1.0 - lateral) * wide, edge), _step((1.0 - third) * 2.0 * growth, edge))
    volume += inside * (CSF - volume)
    return volume


def _folds(x: np.ndarray, y: np.ndarray, z: np.ndarray, person: Person) -> np.ndarray:
    """A folding pattern between -1 and 1 with wavelengths of 18 to 25 mm."""
    a, b, c = person.phase
    waves = np.sin(0.30 * x + a) * np.cos(0.25 * y + b) + np.sin(0.28 * z + c) * np.cos(0.35 * y - a)
    return np.asarray(0.5 * waves, dtype=np.float32)


def _step(signed_mm: np.ndarray, edge: float) -> np.ndarray:
    """0 outside to 1 inside of a surface, with the partial volume of a voxel between."""
    return np.clip(signed_mm / (2.0 * edge) + 0.5, 0.0, 1.0)


@cache
def _axes(shape: tuple[int, int, int]) -> tuple[np.ndarray, ...]:
    """Distances from the centre in mm along each axis, broadcastable, float32."""
    lines = (np.arange(side, dtype=np.float32) * VOXEL_MM - (side - 1) * VOXEL_MM / 2 for side in shape)
    return tuple(np.meshgrid(*lines, indexing="ij", sparse=True))
