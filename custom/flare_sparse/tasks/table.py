"""Any table with one row per example: the columns, the target and its kind are settings, and no code is needed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ..data.atlases import ATLASES
from ..data.features import Features, compute_scale, count_inputs, encode_features, read_labels
from ..data.screening import screen_subjects
from ..data.tables import Table, read_table
from ..errors import DataError
from ..models import ModelConfig
from ..models.config import require_input
from ..split import Split
from ..structure.scaling import InputScaler, TargetScaler
from ..task import Cohort, Examples, Kind, Metric, SiteData, Task, TaskConfig, build_examples
from .outcomes import ClassOutcome, NumberOutcome, Outcome, SurvivalOutcome


def _read_labels(value: Any) -> Any:
    """Return labels as text; YAML reads ``yes`` and ``no`` as booleans."""
    if not isinstance(value, (list, tuple)):
        return value
    if wrong := [label for label in value if isinstance(label, bool) or not isinstance(label, (str, int))]:
        raise ValueError(f"label {wrong[0]!r}: expected text or a whole number; write labels such as 'yes' in quotes")
    labels = tuple(str(label) for label in value)
    if len(set(labels)) < len(labels):
        raise ValueError("a label occurs twice")
    return labels


Labels = Annotated[tuple[str, ...], BeforeValidator(_read_labels)]


def _expand_atlases(value: Any) -> Any:
    """Return names of columns, with the columns of an atlas in place of its name."""
    if not isinstance(value, (list, tuple)):
        return value
    return [column for name in value for column in (ATLASES.get(name, (name,)) if isinstance(name, str) else (name,))]


class TableConfig(TaskConfig):
    """Columns of the table and what is predicted; the same at every site."""

    kind: Kind = Field(
        description="what the target is: a number (regression), one of two labels (binary), one of several (classes), "
        "or the time of an event (survival)"
    )
    target: str = Field(description="column to predict; for survival, the time of the event or of the last visit")
    features: Annotated[tuple[str, ...], BeforeValidator(_expand_atlases)] = Field(
        min_length=1,
        description="columns of the inputs, in order; destrieux and desikan stand for the columns of these FreeSurfer "
        "atlases",
    )
    categories: dict[str, Labels] = Field(
        default_factory=dict, description="labels of the input columns that are categories, {sex: [F, M]}"
    )
    event: str | None = Field(None, description="survival: column with 1 for an event, 0 for the end of observation")
    classes: Labels = Field((), description="labels of the target for binary and classes; default for binary: 0, 1")
    missing: Literal["refuse", "impute"] = Field(
        "refuse",
        description="missing inputs: refuse the example, or impute the center of the column and add an input per "
        "column that marks it",
    )
    scaling: Literal["site", "federated", "none"] | dict[str, tuple[float, Annotated[float, Field(gt=0)]]] = Field(
        "site",
        description="scaling of numbers: by mean and standard deviation of the site's own training examples (site) or "
        "of those of all sites (federated), none, or by constants, {age: [50, 15]}: center and spread of a column",
    )
    target_scale: tuple[float, Annotated[float, Field(gt=0)]] = Field(
        (0.0, 1.0), description="regression: value for the network's output 0, and the change per unit of the output"
    )
    target_scaling: Literal["none", "site"] = Field(
        "none",
        description="regression: site: the network predicts differences from the mean of the site's own training "
        "targets, in units of their standard deviation; both stay at the site, with method.personal: site",
    )
    clip: float | None = Field(
        None, gt=0, description="largest absolute value of a scaled number, against outliers; null: no bound"
    )
    unit: str = Field("", description="regression: unit of the target in tables and plots")
    id: str | None = Field(None, description="column of unique identifiers; null: row numbers, from 1")
    group: str | None = Field(
        None, description="column of subjects with several rows; a subject's rows are in one part of the split"
    )
    skip_bad_subjects: bool = Field(
        False, description="skip and count unusable rows; false: refuse to train if there are any"
    )
    model: Annotated[ModelConfig, require_input("features")] = Field(
        ModelConfig(name="mlp"), description="network and its settings"
    )

    @model_validator(mode="after")
    def _check_columns(self) -> TableConfig:
        if len(set(self.features)) < len(self.features):
            raise ValueError("features: a column occurs twice")
        if self.target in self.features or (self.event is not None and self.event in self.features):
            raise ValueError("features: the target is among them, so the network would be told what to predict")
        known = set(self.features)
        scaled = set(self.scaling) if isinstance(self.scaling, dict) else set()
        for name, extra in (("categories", set(self.categories) - known), ("scaling", scaled - known)):
            if extra:
                raise ValueError(f"{name}: {min(extra)!r} is not among the features; add it there or remove it")
        if self.kind == "survival" and self.event is None:
            raise ValueError("event is missing; set the column with 1 for an event, 0 for the end of observation")
        if self.kind != "regression" and self.target_scaling != "none":
            raise ValueError(f"target_scaling is for kind regression, not for {self.kind}; remove it")
        if self.kind != "survival" and self.event is not None:
            raise ValueError(f"event is for kind survival, not for {self.kind}; remove it")
        expected = {"binary": len(self.classes) in (0, 2), "classes": len(self.classes) > 2}
        if not expected.get(self.kind, not self.classes):
            raise ValueError(
                f"classes has {len(self.classes)} labels; expected 2 for binary, 3 or more for classes, none for others"
            )
        return self

    @property
    def privacy_blocker(self) -> str | None:
        """Why one subject changes another's inputs or loss."""
        if self.target_scaling == "site":
            return "task.target_scaling: site computes mean and standard deviation of all subjects; leave it out"
        if self.scaling in ("site", "federated"):
            return (
                f"task.scaling: {self.scaling} computes mean and standard deviation of all subjects; give constants, "
                "{age: [50, 15]}, or none"
            )
        return "kind survival: the loss compares subjects with each other" if self.kind == "survival" else None

    @property
    def num_inputs(self) -> int:
        """Number of the network's inputs."""
        return count_inputs(self.features, self.categories, has_indicators=self.missing == "impute")

    @property
    def numeric_inputs(self) -> tuple[bool, ...]:
        """Which of the network's inputs are numbers; the others are categories and indicators."""
        inputs = [name not in self.categories for name in self.features for _ in self.categories.get(name, ("",))]
        return (*inputs, *(False for _ in range(self.num_inputs - len(inputs))))

    def build_outcome(self) -> Outcome:
        """Return the outcome of the configured kind."""
        if self.kind == "regression":
            return NumberOutcome(self.target, self.unit, *self.target_scale)
        if self.kind == "survival":
            assert self.event is not None, "checked above"
            return SurvivalOutcome(self.target, self.event)
        return ClassOutcome(self.target, self.classes or ("0", "1"))


class TableTask(Task):
    """A number, a class or the time of an event from the columns of any table; batches are ``(inputs, targets)``."""

    Config = TableConfig
    config: TableConfig
    # Of the most frequent kind; the settings decide.
    metric = Metric("auc", "", "max", may_be_undefined=True)
    reads = "a table (CSV, Parquet or npz) with one row per example and the columns that the settings name"

    def __init__(self, config: TaskConfig | Mapping[str, Any] | None = None):
        super().__init__(config)
        self._outcome = self.config.build_outcome()
        self.metric, self.kind = self._outcome.metric, self._outcome.kind

    def model(self) -> nn.Module:
        """Return the configured network."""
        network = self.config.model.build(features=self.config.num_inputs, outputs=self._outcome.outputs)
        layers = OrderedDict(network=network)
        if self.config.scaling == "federated":
            layers = OrderedDict(scaler=InputScaler(self.config.numeric_inputs, self.config.clip), network=network)
        if self.config.target_scaling == "site":
            layers["target"] = TargetScaler()
        return nn.Sequential(layers) if len(layers) > 1 else network

    def describe_site(self, train: Dataset[Any]) -> dict[str, Tensor]:
        """Return center and spread of the site's training targets, in the network's units."""
        if self.config.target_scaling == "none":
            return {}
        center, spread = self.config.target_scale
        targets = self.tabulate_all(train)[1]
        return {"target.statistics": TargetScaler().compute_statistics((targets - center) / spread)}

    def cohort(self, path: Path) -> Cohort:
        """Return the rows with all columns of the table."""
        table = _read_cached(path, path.stat().st_mtime_ns if path.is_file() else 0)
        return Cohort(self._get_ids(table), table.columns)

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read the rows of a site."""
        config, path = self.config, data.path
        table = _read_cached(path, path.stat().st_mtime_ns if path.is_file() else 0)
        has_indicators = config.missing == "impute"
        features = encode_features(table, config.features, config.categories, has_indicators=has_indicators)
        targets, ids = self._outcome.read(table), self._get_ids(table)
        row_of = {name: row for row, name in enumerate(ids)}

        def find_row(name: str) -> int:
            if name not in row_of:
                raise DataError(f"it has no row in {data.path.name}")
            row = row_of[name]
            if not np.isfinite(targets[row]).all():
                raise DataError(f"its {config.target} is missing")
            if not has_indicators and (columns := features.describe_missing(row)):
                raise DataError(f"features are missing: {columns}; task.missing: impute fills them in")
            return row

        selected = row_of if data.subset is None else data.subset
        rows, skipped = screen_subjects(
            selected, find_row, skip_bad_subjects=config.skip_bad_subjects, source=data.path
        )
        split = self._split(table, rows, seed)
        # With federated scaling the network itself scales and imputes: the statistics are not known here.
        is_federated = config.scaling == "federated"
        scaled = features if is_federated else self._scale(features, [rows[name] for name in split.train]).impute()
        if config.clip is not None and not is_federated:
            scaled = scaled.clip(config.clip)
        inputs = scaled.values

        def build_dataset(names: Sequence[str]) -> TensorDataset:
            chosen = [rows[name] for name in names]
            x, y = inputs[chosen].astype(np.float32), targets[chosen].astype(np.float32)
            return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

        examples = build_examples(split, build_dataset, skipped, features.names)
        if config.group is None:
            return examples
        subject_of = self._get_subjects(table, rows)
        train, test, validation = (
            [subject_of[name] for name in names] for names in (split.train, split.test, split.validation)
        )
        return replace(examples, train_subjects=train, test_subjects=test, validation_subjects=validation)

    def _get_ids(self, table: Table) -> tuple[str, ...]:
        """Return the identifier of each row.

        Raises:
            DataError: an identifier occurs twice or is missing.
        """
        if self.config.id is None:
            return tuple(str(row) for row in range(1, len(next(iter(table.columns.values()))) + 1))
        ids = read_labels(table, self.config.id)
        if repeated := [name for name, count in Counter(ids).items() if count > 1]:
            raise DataError(
                f"{table.source}: {len(repeated)} identifiers in column {self.config.id!r} occur more than once or are "
                f"missing (first: {repeated[0]!r}). If a subject has several rows, set task.group: {self.config.id} "
                "and task.id: null; otherwise remove the repeated rows"
            )
        return tuple(ids)

    def _split(self, table: Table, rows: Mapping[str, int], seed: int) -> Split:
        """Return the split of the rows, with all rows of a subject in one part."""
        if self.config.group is None:
            return self.config.split.assign(rows, seed)
        subject_of = self._get_subjects(table, rows)
        by_subject = self.config.split.assign(set(subject_of.values()), seed)
        parts = ({*by_subject.train}, {*by_subject.validation}, {*by_subject.test})
        return Split(*(tuple(name for name in rows if subject_of[name] in part) for part in parts))

    def _get_subjects(self, table: Table, rows: Mapping[str, int]) -> dict[str, str]:
        """Return the subject of each row, by the row's identifier."""
        assert self.config.group is not None, "rows without a group are subjects of their own"
        labels = read_labels(table, self.config.group)
        # A row without a subject is a subject of its own.
        return {name: labels[row] or f"row {name}" for name, row in rows.items()}

    def _scale(self, features: Features, train: Sequence[int]) -> Features:
        scaling = self.config.scaling
        if scaling == "site":
            return features.scale(*compute_scale(features, train))
        constants = scaling if isinstance(scaling, dict) else {}
        pairs = np.array([constants.get(name, (0.0, 1.0)) for name in features.names])
        return features.scale(pairs[:, 0], pairs[:, 1])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of the batch, a scalar."""
        inputs, targets = batch
        return self._outcome.loss(model(inputs), targets)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions ``(B, k)`` and targets ``(B, t)``."""
        inputs, targets = batch
        return self._outcome.predict(model(inputs)), targets

    def tabulate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return inputs and targets for linear baselines; a missing number is 0, which its indicator corrects."""
        features, targets = super().tabulate(batch)
        return torch.nan_to_num(features), targets

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of the configured kind."""
        return self._outcome.metrics(predictions, targets)


@lru_cache(maxsize=1)
def _read_cached(path: Path, version: int) -> Table:  # noqa: ARG001
    """Read a table, and keep it while its file is unchanged: the sites of a simulated federation share one file."""
    return read_table(path)
