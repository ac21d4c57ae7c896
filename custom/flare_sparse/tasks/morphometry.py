"""Age and sex from FreeSurfer tables: regional cortical thickness and volumes, one row per subject.

Features are scaled by anatomical constants, so that no site has to reveal its own statistics:

* thickness in mm (columns ending in ``_thickness``): ``(t - 2.5) / 0.5``; the human cortex is 1 to 4.5 mm thick, 2.5 mm
  on average (Fischl and Dale 2000, PNAS 97:11050);
* intracranial volume (column ``ICV``): ``(litres - 1.5) / 0.2``;
* volume in mm3 (every other column): ``(ln(per mille of ICV) - 1) / 2``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.utils.data import TensorDataset

from ..core.errors import DataError, list_first_lines, suggest
from .age import AgeConfig, AgeTask
from .classes import BinaryTask
from .data.atlases import ATLASES
from .data.screening import SEX_VALUES, parse_sex, screen_subjects
from .data.tables import Table, format_identifier, read_table
from .models import ModelConfig
from .models.config import require_input
from .task import Cohort, Examples, SiteData, Task, TaskConfig, build_examples

ID = "subject"


class MorphometryConfig(TaskConfig):
    """Selection of the input columns, and the network."""

    model: Annotated[ModelConfig, require_input("features")] = Field(
        ModelConfig(name="mlp"), description="network and its settings"
    )
    features: Literal["destrieux", "desikan"] | tuple[str, ...] = Field(
        "destrieux",
        description="a known atlas (its columns, in name order; others are ignored), or a list of column names",
    )
    skip_bad_subjects: bool = Field(
        False, description="skip and count unusable subjects; false: refuse to train if there are any"
    )

    @property
    def num_features(self) -> int:
        """Number of the network's inputs."""
        return len(ATLASES[self.features] if isinstance(self.features, str) else self.features)


class MorphometryTask(Task, ABC):
    """Prediction of one number, the target, from rows ``(B, features)``.

    Attributes:
        target_problem: text of a subject whose target is unknown.
    """

    config: MorphometryConfig
    target_problem: ClassVar[str]
    reads = (
        "a table of FreeSurfer values (CSV, Parquet or npz), one row per subject, with the columns subject, age, sex "
        "(0 or F: female, 1 or M: male), thickness in mm and volumes in mm3"
    )

    @staticmethod
    @abstractmethod
    def get_targets(table: Table) -> np.ndarray:
        """Return the value to predict for every subject, ``(n,)``; NaN where it is unknown."""

    def model(self) -> nn.Module:
        """Return the configured network with one output."""
        return self.config.model.build(features=self.config.num_features, outputs=1)

    def cohort(self, path: Path) -> Cohort:
        """Return the subjects with all columns of the table."""
        return read_table(path).to_cohort(ID)

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read the rows of a site."""
        table = read_table(data.path)
        columns = select_feature_columns(table, self.config.features)
        features = scale_features(table, columns)
        targets = self.get_targets(table)
        row_of = {name: number for number, name in enumerate(table.get_ids(ID))}

        def find_row(name: str) -> int:
            if name not in row_of:
                raise DataError(f"unknown participant: it has no row in {data.path.name}")
            row = row_of[name]
            if not np.isfinite(targets[row]):
                raise DataError(self.target_problem)
            if missing := [columns[column] for column in np.flatnonzero(~np.isfinite(features[row]))]:
                names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
                raise DataError(f"{len(missing)} of {len(columns)} features are missing or not finite: {names}")
            return row

        ids = data.select(row_of)
        skip = self.config.skip_bad_subjects
        rows, skipped = screen_subjects(ids, find_row, skip_bad_subjects=skip, source=data.path)

        def build_dataset(names: Sequence[str]) -> TensorDataset:
            selected = [rows[name] for name in names]
            x, y = features[selected].astype(np.float32), targets[selected, None].astype(np.float32)
            return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

        return build_examples(self.config.split.assign(rows, seed), build_dataset, skipped, columns)


class MorphometryAgeConfig(MorphometryConfig, AgeConfig):
    """Settings of ``morphometry_age``."""


class MorphometryAge(AgeTask, MorphometryTask):
    """Age in years from thickness and volumes."""

    Config = MorphometryAgeConfig
    config: MorphometryAgeConfig
    target_problem = "its age is missing, or not 0 to 120 years"

    @staticmethod
    def get_targets(table: Table) -> np.ndarray:
        """Return the age in years."""
        age = table.get_numbers("age")
        return np.where((age >= 0) & (age <= 120), age, np.nan)


class MorphometrySex(BinaryTask, MorphometryTask):
    """Sex (1: male) from thickness and volumes."""

    Config = MorphometryConfig
    target_problem = f"its sex is missing, or not {SEX_VALUES}"

    @staticmethod
    def get_targets(table: Table) -> np.ndarray:
        """Return the column ``sex``: 1 for male, 0 for female."""
        return np.array([parse_sex(format_identifier(value)) for value in table.get_column("sex").tolist()])


def select_feature_columns(table: Table, features: str | Sequence[str]) -> list[str]:
    """Return the names of the feature columns, in the same order at every site.

    Raises:
        DataError: columns of the atlas are missing or contain text; the message names each.
    """
    if not isinstance(features, str):
        return list(features)
    columns = list(ATLASES[features])
    missing = [name for name in columns if name not in table.columns]
    if not missing:
        return columns
    unused = [name for name in table.columns if name not in columns]
    lines = list_first_lines([f"no column {name!r}.{suggest(name, unused)}" for name in missing], 5)
    listed = "".join(f"\n  {line}" for line in lines)
    matching = [name for name, known in ATLASES.items() if set(known) <= set(table.columns)]
    other = f"task.features to {f'{matching[0]}, ' if matching else ''}the atlas of this table"
    count = f"{len(missing)} of the {len(columns)} columns of atlas {features!r} are missing"
    raise DataError(
        f"{table.source}: {count}:{listed}\nRename the columns, or set {other}, or to a list of the columns that "
        "all sites have"
    )


def scale_features(table: Table, names: Sequence[str]) -> np.ndarray:
    """Return features ``(n, len(names))``, float64, scaled by the constants in the module's docstring.

    Raises:
        DataError: a column is missing or contains text.
    """
    litre = 1e6
    icv = table.get_numbers("ICV") if any(not name.endswith("_thickness") for name in names) else np.array(np.nan)

    def scale(name: str) -> np.ndarray:
        values = table.get_numbers(name)
        if name.endswith("_thickness"):
            return (values - 2.5) / 0.5
        if name == "ICV":
            return (values / litre - 1.5) / 0.2
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray((np.log(np.maximum(values, 1.0) / icv * 1000) - 1) / 2)

    return np.stack([scale(name) for name in names], axis=1)
