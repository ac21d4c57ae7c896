"""Any table with one row per example: the columns, the target and its kind are settings, and no code is needed."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from ..cohorts.conditions import Term
from ..cohorts.split import Split
from ..core.errors import DataError
from ..inputs.scaling import TargetScaler
from .data.absence import find_absent_rows
from .data.features import (
    Features,
    compute_scale,
    encode_features,
    name_labels,
    number_labels,
    read_labels,
    scale_anatomically,
)
from .data.screening import screen_subjects
from .data.tables import PLAIN, Spelling, Table, read_table
from .outcomes import NumberOutcome
from .table_config import TableConfig
from .task import Cohort, Column, Examples, Metric, SiteData, Task, TaskConfig, build_examples

FEW_ROWS = 20
"""Number of rows below which their scale is inaccurate: the standard error of the deviation of 20 rows is 16 %."""


class TableTask(Task):
    """A number, a class or the time of an event from the columns of any table; batches are ``(inputs, targets)``."""

    Config = TableConfig
    config: TableConfig
    # This metric is that of the most frequent kind; the settings decide.
    metric = Metric("auc", "", "max", may_be_undefined=True)
    reads = "a table (CSV, xlsx, Parquet, ...) with one row per example and the columns that the settings name"

    def __init__(self, config: TaskConfig | Mapping[str, Any] | None = None):
        super().__init__(config)
        self._outcome = self.config.build_outcome()
        self.metric, self.kind = self._outcome.metric, self._outcome.kind
        self._has_classes = self.config.kind in ("binary", "classes")

    def model(self) -> nn.Module:
        """Return the configured network."""
        network = self.config.model.build(
            features=len(self.config.numeric_inputs), outputs=self._outcome.outputs, numbers=self.config.numeric_inputs
        )
        layers = OrderedDict(network=network)
        if self.config.scales_in_network:
            layers = OrderedDict(scaler=self.config.build_scaler(), network=network)
        if self.config.target_scaling == "site":
            layers["target"] = TargetScaler()
        return nn.Sequential(layers) if len(layers) > 1 else network

    def describe_site(self, train: Dataset[Any]) -> dict[str, Tensor]:
        """Return center and spread of the training targets in the network's units, and statistics of the inputs."""
        described = {}
        if self.config.target_scaling == "site":
            assert isinstance(self._outcome, NumberOutcome), "checked with the settings"
            targets = self._outcome.standardise(self.tabulate_all(train)[1])
            described["target.statistics"] = TargetScaler().measure_targets(targets)
        if self.config.scaling == "combat":
            described["scaler.site"] = self.config.build_scaler().describe_site(self.tabulate_all(train)[0])
        return described

    def cohort(self, path: Path) -> Cohort:
        """Return the rows with all columns of the table."""
        table = _read_file(path)
        row_of = self._number_rows(table)
        subjects = self._get_subjects(table, row_of) if self.config.group else {}
        chosen = list(row_of.values())
        columns = {name: values[chosen] for name, values in table.columns.items()}
        return Cohort(tuple(row_of), columns, tuple(subjects.values()))

    def _read(self, path: Path, site_id: str | None) -> Table:
        """Return the table at ``path`` without the values that stand for missing ones, with the site's own column."""
        config = self.config
        codes = tuple((column, frozenset(values)) for column, values in config.codes_by_column.items())
        named = (config.target, config.event, config.group, config.id, site_id, *config.rows)
        columns = frozenset({*config.features, *(name for name in named if name is not None)})
        return _read_file(path, codes, Spelling(config.decimal, config.censored), columns)

    def list_row_conditions(self) -> list[Term]:
        """Return the conditions of ``rows``, and the codes of missing values that are not filled in."""
        config = self.config
        filled = config.features if config.missing == "impute" else ()
        codes = {name: codes for name, codes in config.codes_by_column.items() if codes and name not in filled}
        return [
            *(Term(name, frozenset(values), keeps=True) for name, values in config.rows.items()),
            *(Term(name, frozenset(values)) for name, values in codes.items()),
        ]

    def get_person_column(self) -> str | None:
        return self.config.group or self.config.id or "the number of its row"

    def describe_columns(self, data: SiteData) -> list[Column]:
        """Return what the columns of the settings contain in the rows of a site; a column that it lacks is left out."""
        config, table = self.config, self._read(data.path, data.id)
        row_of = self._number_rows(table)
        rows = [row_of[name] for name in self._select(data, table, row_of) if name in row_of]
        kinds = {config.target: "target", config.event: "event", config.group: "subject"}
        kinds |= {name: "category" if name in config.categories else "number" for name in config.features}
        described = []
        for name in [name for name in kinds if name is not None and name in table.columns]:
            labelled = {config.target: config.classes, **config.categories}.get(name, ())
            has_numbers = kinds[name] in ("number", "event") or (name == config.target and not self._has_classes)
            if has_numbers and not table.is_text(name):
                values = table.get_numbers(name)[rows]
                present = values[np.isfinite(values)]
                described.append(Column(name, kinds[name], len(rows) - len(present), present))
                continue
            position, titles = number_labels(labelled), name_labels(labelled)
            every = read_labels(table, name, position)
            present_labels = [every[row] for row in rows if every[row]]
            labels = Counter(titles[position[label]] if label in position else label for label in present_labels)
            kind = "text" if kinds[name] == "number" else kinds[name]
            described.append(Column(name, kind, len(rows) - sum(labels.values()), np.zeros(0), labels))
        return described

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read the rows of a site."""
        config, table = self.config, self._read(data.path, data.id)
        has_indicators = config.missing == "impute"
        features = encode_features(table, config.features, config.categories, has_indicators=has_indicators)
        targets, row_of = self._outcome.read(table), self._number_rows(table)
        texts = table.get_names(config.target) if self._has_classes else [""] * len(targets)

        def find_row(name: str) -> int:
            if name not in row_of:
                among = f" among those with {config.describe_rows()}" if config.rows else ""
                raise DataError(f"it has no row in {data.path.name}{among}")
            row = row_of[name]
            if not np.isfinite(targets[row]).all():
                column = config.event if np.isfinite(targets[row, 0]) else config.target
                text = texts[row] if column == config.target else ""
                note = f": {text!r} counts as missing, unless task.classes names it" if text else ""
                raise DataError(f"its {column} is missing{note}")
            if not has_indicators and (columns := features.describe_missing(row)):
                raise DataError(f"features are missing: {columns}; task.missing: impute fills them in")
            return row

        rows, skipped = screen_subjects(
            self._select(data, table, row_of), find_row, skip_bad_subjects=config.skip_bad_subjects, source=data.path
        )
        subject_of = self._get_subjects(table, rows) if config.group else {name: name for name in rows}
        split = config.split.assign_subjects(subject_of, seed)
        if config.group:
            # The rows of several subjects stay in the order of the file.
            parts = (frozenset(split.train), frozenset(split.validation), frozenset(split.test))
            split = Split(*(tuple(name for name in rows if name in part) for part in parts))
        # With federated scaling the network itself scales and imputes: the statistics are not known here.
        inputs = features.values
        if not config.scales_in_network:
            inputs = self._scale(features, [rows[name] for name in split.train]).complete(config.clip)

        def build_dataset(names: Sequence[str]) -> TensorDataset:
            chosen = [rows[name] for name in names]
            x, y = inputs[chosen].astype(np.float32), targets[chosen].astype(np.float32)
            return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))

        examples = build_examples(split, build_dataset, skipped, features.names, subject_of)
        if config.scaling == "site" and features.numbers.any():
            examples = replace(examples, notes=(_describe_scale(len(split.train)),))
        if warning := config.describe_scale_mismatch(targets[[rows[name] for name in split.train]]):
            examples = replace(examples, warnings=(*examples.warnings, warning))
        return examples

    def _number_rows(self, table: Table) -> dict[str, int]:
        """Return the rows that are examples, by identifier."""
        own = self.config.id
        ids = [str(row) for row in range(1, table.rows + 1)] if own is None else table.get_ids(own)
        chosen = np.ones(table.rows, bool)
        for name, values in self.config.rows.items():
            chosen &= np.isin(read_labels(table, name, values), values)
        if not chosen.any():
            raise DataError(f"{table.source}: no row has {self.config.describe_rows()} (task.rows)")
        return {ids[row]: int(row) for row in np.flatnonzero(chosen)}

    def _select(self, data: SiteData, table: Table, row_of: Mapping[str, int]) -> tuple[str, ...]:
        """Return the identifiers of the rows that a site may use."""
        absent = find_absent_rows(data, table)
        names = tuple(row_of) if data.subset is None else data.subset
        return tuple(name for name in names if row_of.get(name) not in absent) if absent else names

    def _get_subjects(self, table: Table, rows: Mapping[str, int]) -> dict[str, str]:
        """Return the subject of each row, by the row's identifier."""
        assert self.config.group is not None, "rows without a group are subjects of their own"
        labels = table.get_names(self.config.group)
        # A row without a subject is a subject of its own.
        return {name: labels[row] or f"row {name}" for name, row in rows.items()}

    def _scale(self, features: Features, train: Sequence[int]) -> Features:
        scaling = self.config.scaling
        if scaling == "freesurfer":
            return scale_anatomically(features)
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

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of the configured kind."""
        return self._outcome.metrics(predictions, targets)


def _describe_scale(rows: int) -> str:
    """Return which rows the scale of the inputs is computed from, with a warning if they are few."""
    source = f"task.scaling: site: numbers are scaled by mean and standard deviation of {rows} rows of this data"
    if rows >= FEW_ROWS:
        return f"{source}, those that the split assigns to training"
    return (
        f"{source}: so few rows make the scale inaccurate, and with it the predictions. A model trained with "
        "task.scaling: federated or constants does not depend on them"
    )


Codes = tuple[tuple[str, frozenset[str]], ...]
"""Values that stand for missing ones, by column."""


def _read_file(
    path: Path, codes: Codes = (), spelling: Spelling = PLAIN, columns: frozenset[str] = frozenset()
) -> Table:
    """Return the table at ``path``; values among the codes of their column are missing.

    Of a Parquet file, only ``columns`` are read; an empty set means all.
    """
    needed = columns if path.suffix == ".parquet" else frozenset()
    return _read_cached(path, path.stat().st_mtime_ns if path.is_file() else 0, codes, spelling, needed)


# Two readings are kept: the file as it is, for the partition, and one by the job's rules, for the sites.
@lru_cache(maxsize=2)
def _read_cached(path: Path, version: int, codes: Codes, spelling: Spelling, columns: frozenset[str]) -> Table:
    """Read a table, and keep it while its file is unchanged: the sites of a simulated federation share one file."""
    if not codes and spelling == PLAIN:
        return read_table(path, columns)
    table = _read_cached(path, version, (), PLAIN, columns)
    return Table(path, table.columns, dict(codes), spelling)
