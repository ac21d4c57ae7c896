"""Brain age and sex from T1-weighted volumes in BIDS."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator
from torch import nn

from ..data import bids
from ..data.screening import screen
from ..data.split import train_test
from ..data.volumes import Item, Volumes, preparation, read_voxels
from ..models import ModelConfig
from ..models.config import reading
from ..models.fields import Volume
from ..task import Cohort, Examples, SiteData
from .adaptation import AdaptableTask, AdaptationConfig
from .age import AgeConfig, AgeTask
from .classes import BinaryTask


class BrainConfig(AdaptationConfig):
    """How volumes become inputs, and the network that reads them."""

    model: Annotated[ModelConfig, reading("volume")] = Field(
        ModelConfig(name="brain_age_cnn_3mm"), description="network, with its settings"
    )
    shape: Volume = Field((52, 64, 52), description="voxels of every volume on disk, in RAS orientation")
    spacing: tuple[float, float, float] | None = Field(
        None, description="mm a voxel side of every volume on disk, within 2 %; none: any"
    )
    downsample: int = Field(2, ge=1, le=16, description="voxels a side of the cubes whose mean is an input voxel")
    cache: bool = Field(True, description="keep all inputs in memory; otherwise a volume is read for every use")
    skip_bad_subjects: bool = Field(
        False, description="leave unusable subjects out and count them; else refuse to work"
    )

    @model_validator(mode="after")
    def _something_left(self) -> BrainConfig:
        if min(self.shape) < self.downsample:
            raise ValueError(f"downsample {self.downsample} leaves nothing of shape {list(self.shape)}")
        return self

    @property
    def volume(self) -> tuple[int, ...]:
        """Voxels of an input, (depth, height, width)."""
        return tuple(side // self.downsample for side in self.shape)


class BrainTask(AdaptableTask, ABC):
    """Volumes (B, 1, depth, height, width) to one number; what it is, a subclass says."""

    config: BrainConfig

    @staticmethod
    @abstractmethod
    def target(subject: bids.Subject) -> float:
        """What is to be learned of a subject."""

    def network(self) -> nn.Module:
        """The configured network with one output."""
        return self.config.model.build(volume=self.config.volume, outputs=1)

    def cohort(self, path: Path) -> Cohort:
        """The participants with all their columns, ``site`` among them where the data names sites."""
        return bids.cohort(path)

    def load(self, data: SiteData, seed: int) -> Examples:
        """Every subject is read and checked once; 20 % are for testing."""
        subjects, shape, spacing = bids.read_subjects(data.path), self.config.shape, self.config.spacing
        prepare = preparation(self.config.downsample)

        def read(name: str) -> Item:
            subject = subjects.get(name, bids.Subject())
            target, file = self.target(subject), subject.file()
            voxels = read_voxels(file, shape, spacing)
            return Item(file, target, prepare(voxels) if self.config.cache else None)

        wanted = subjects if data.subset is None else data.subset
        skip = self.config.skip_bad_subjects
        found, skipped = screen(wanted, read, skip_bad_subjects=skip, source=data.path)

        train, test = (
            Volumes([found[name] for name in names], shape, self.config.downsample, spacing)
            for names in train_test(found, seed)
        )
        return Examples(train, test, skipped)


class BrainAgeConfig(BrainConfig, AgeConfig):
    """Settings of ``brain_age``."""


class BrainAge(AgeTask, BrainTask):
    """Age in years from a T1-weighted volume."""

    Config = BrainAgeConfig
    config: BrainAgeConfig

    @staticmethod
    def target(subject: bids.Subject) -> float:
        """Age in years."""
        return subject.age()


class SexClassification(BinaryTask, BrainTask):
    """Sex (1: male) from a T1-weighted volume."""

    Config = BrainConfig

    @staticmethod
    def target(subject: bids.Subject) -> float:
        """1 for male, 0 for female."""
        return subject.sex()
