"""Age and sex from FreeSurfer tables: regional cortical thickness and volumes, one row a subject.

Features are scaled by constants of anatomy, so no site has to tell a statistic of its own:

* thickness in mm, columns that end with ``_thickness``: ``(t - 2.5) / 0.5`` (the human cortex is 1 to 4.5 mm thick,
  2.5 mm on average: Fischl and Dale 2000, PNAS 97:11050);
* intracranial volume, column ``ICV``: ``(litres - 1.5) / 0.2``;
* every other column, a volume in mm3: ``(ln(per mille of ICV) - 1) / 2``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.utils.data import TensorDataset

from ..data.screening import screen
from ..data.split import train_test
from ..data.tables import Table, read_table
from ..errors import DataError
from ..models import ModelConfig
from ..models.config import reading
from ..task import Cohort, Examples, SiteData, Task, TaskConfig
from .age import AgeConfig, AgeTask
from .classes import BinaryTask

ID = "subject"
NOT_FEATURES = (ID, "site", "age", "sex", "dx")


@dataclass(frozen=True)
class Atlas:
    """A known set of columns.

    Attributes:
        features: how many there are.
        fingerprint: first 16 hex digits of the SHA-256 of their sorted names, joined by line feeds.
    """

    features: int
    fingerprint: str


ATLASES = {
    "destrieux": Atlas(193, "371e3d3a31204872"),  # 150 regions, 42 subcortical and global volumes, ICV
    "desikan": Atlas(71, "c9cb0f7de658393e"),  # 70 regions, ICV
}


class MorphometryConfig(TaskConfig):
    """Which columns become inputs."""

    model: Annotated[ModelConfig, reading("features")] = Field(
        ModelConfig(name="mlp"), description="network, with its settings"
    )
    features: Literal["destrieux", "desikan"] | tuple[str, ...] = Field(
        "destrieux", description="a known atlas, every numeric column in name order; or the names of the columns"
    )
    skip_bad_subjects: bool = Field(
        False, description="leave unusable subjects out and count them; else refuse to work"
    )

    @property
    def inputs(self) -> int:
        """Numbers in a row."""
        return ATLASES[self.features].features if isinstance(self.features, str) else len(self.features)


class MorphometryTask(Task, ABC):
    """Rows (B, features) to one number; what it is, a subclass says."""

    config: MorphometryConfig

    @staticmethod
    @abstractmethod
    def targets(table: Table) -> np.ndarray:
        """What is to be learned of every subject, NaN where it is not known, ``(n,)``."""

    def model(self) -> nn.Module:
        """The configured network with one output."""
        return self.config.model.build(features=self.config.inputs, outputs=1)

    def cohort(self, path: Path) -> Cohort:
        """The subjects with all columns of the table."""
        return read_table(path).cohort(ID)

    def load(self, data: SiteData, seed: int) -> Examples:
        """The rows of a site; 20 % are for testing."""
        table = read_table(data.path)
        features, targets = scaled(table, columns(table, self.config.features)), self.targets(table)
        place = {name: number for number, name in enumerate(table.ids(ID))}

        def read(name: str) -> int:
            if name not in place:
                raise DataError(f"unknown participant: it has no row in {data.path.name}")
            if not np.isfinite(targets[place[name]]):
                raise DataError("its age or sex is missing or out of range")
            if missing := int(np.count_nonzero(~np.isfinite(features[place[name]]))):
                raise DataError(f"{missing} of {features.shape[1]} features are missing or not finite")
            return place[name]

        wanted = place if data.subset is None else data.subset
        skip = self.config.skip_bad_subjects
        found, skipped = screen(wanted, read, skip_bad_subjects=skip, source=data.path)

        def rows(names: Sequence[str]) -> TensorDataset:
            chosen = [found[name] for name in names]
            x, y = features[chosen].astype(np.float32), targets[chosen, None].astype(np.float32)
            return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

        train, test = train_test(found, seed)
        return Examples(rows(train), rows(test), skipped)


class MorphometryAgeConfig(MorphometryConfig, AgeConfig):
    """Settings of ``morphometry_age``."""


class MorphometryAge(AgeTask, MorphometryTask):
    """Age in years from thickness and volumes."""

    Config = MorphometryAgeConfig
    config: MorphometryAgeConfig

    @staticmethod
    def targets(table: Table) -> np.ndarray:
        """Age in years."""
        age = table.numbers("age")
        return np.where((age >= 0) & (age <= 120), age, np.nan)


class MorphometrySex(BinaryTask, MorphometryTask):
    """Sex (1: male) from thickness and volumes."""

    Config = MorphometryConfig

    @staticmethod
    def targets(table: Table) -> np.ndarray:
        """The column ``sex``: 1 for male, 0 for female."""
        sex = table.numbers("sex")
        return np.where(np.isin(sex, (0, 1)), sex, np.nan)


def columns(table: Table, features: str | Sequence[str]) -> list[str]:
    """Names of the feature columns, in the order in which every site gives them to the network.

    Raises:
        DataError: the table's numeric columns are not those of the atlas.
    """
    if not isinstance(features, str):
        return list(features)
    found = sorted(name for name, c in table.columns.items() if name not in NOT_FEATURES and c.dtype.kind == "f")
    atlas = ATLASES[features]
    if sha256("\n".join(found).encode()).hexdigest()[:16] != atlas.fingerprint:
        raise DataError(
            f"{table.source}: its {len(found)} numeric columns are not the {atlas.features} of atlas {features!r}. Give "
            "task.features the atlas of this table, or the names of the columns that all sites have"
        )
    return found


def scaled(table: Table, names: Sequence[str]) -> np.ndarray:
    """Features ``(n, len(names))``, float64, scaled by the constants at the top of this module.

    Raises:
        DataError: a column is not there or holds text.
    """
    litre = 1e6
    icv = table.numbers("ICV") if any(not name.endswith("_thickness") for name in names) else np.array(np.nan)

    def scale(name: str) -> np.ndarray:
        values = table.numbers(name)
        if name.endswith("_thickness"):
            return (values - 2.5) / 0.5
        if name == "ICV":
            return (values / litre - 1.5) / 0.2
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((np.log(np.maximum(values, 1.0) / icv * 1000) - 1) / 2)

    return np.stack([scale(name) for name in names], axis=1)
