"""Prediction of death in hospital from the medications of a stay (SCBF, section 4.1): multi-hot codes, one logit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..core.errors import DataError
from ..core.ranking import compute_auc, compute_average_precision
from ..core.split import Split
from .data.admissions import AdmissionColumns, Admissions, read_admissions
from .models import ModelConfig
from .models.config import require_input
from .task import Cohort, Examples, Metric, SiteData, Task, TaskConfig, build_examples

BINS = 10


class MortalityConfig(TaskConfig):
    """Columns of a stay, and the network; every site must have the same medications in the same order."""

    model: Annotated[ModelConfig, require_input("features")] = Field(
        ModelConfig(name="mlp", hidden=(64, 32)), description="network and its settings"
    )
    medications: int = Field(2917, ge=1, le=1_000_000, description="number of medication codes")
    levels: int = Field(
        1, ge=1, le=255, description="number of non-zero values of a code, such as doses; each becomes its own input"
    )
    codes: str = Field(
        "med", description="array of the codes in an .npz file, or prefix of the code columns in a table"
    )
    outcome: str = Field("died", description="column: 1 died, 0 survived; stays with any other value are dropped")
    stay: str | None = Field("stay", description="column of the stays' identifiers; null: row numbers")
    patient: str | None = Field(
        None, description="column of the patients; a patient's stays are all for training or all for testing"
    )
    include: str | None = Field(None, description="column of 0 and 1; only stays with 1 are used; null: all")
    positive_weight: Literal["none", "balanced"] | float = Field(
        "none",
        description="weight of a death in the loss; balanced: survivors divided by deaths among the site's own "
        "training stays. Any weight but 1 shifts the predicted risks: see calibration_error",
    )

    @property
    def columns(self) -> AdmissionColumns:
        """Names of the columns to read from a file."""
        return AdmissionColumns(self.outcome, self.codes, self.stay, self.patient, self.include)


class Mortality(Task):
    """Prediction of death; batches are ``(codes (B, inputs) uint8, died (B, 1), weight (B, 1))``."""

    Config = MortalityConfig
    config: MortalityConfig
    metric = Metric("auc_roc", "", "max", may_be_undefined=True)
    kind = "binary"
    reads = (
        "a table or an npz file with one row per stay: the column died (1 or 0) and a code per medication, in the same "
        "order at every site"
    )

    def model(self) -> nn.Module:
        """Return the configured network with one output, the logit of death."""
        return self.config.model.build(features=self.config.medications * self.config.levels, outputs=1)

    def cohort(self, path: Path) -> Cohort:
        """Return the usable stays with every column that has one value per stay."""
        return _read_cached(path, self.config.columns).cohort

    def load(self, data: SiteData, seed: int) -> Examples:
        """Read the stays of a site; ``split`` is by patient."""
        stays = _read_cached(data.path, self.config.columns)
        if stays.codes.shape[1] != self.config.medications:
            raise DataError(
                f"{data.path}: {stays.codes.shape[1]} medications, but task.medications is {self.config.medications}. "
                "All sites must use the same vocabulary"
            )
        row_of = {name: row for row, name in enumerate(stays.ids)}
        names = data.select(row_of, lambda name: stays.patients[row_of[name]])
        rows = np.array([row_of[name] for name in names if name in row_of], dtype=np.int64)
        if len(rows) < len(names):
            raise DataError(f"{data.path}: {len(names) - len(rows)} of {len(names)} stays are not in the file")
        split = self.config.split.assign({stays.patients[row] for row in rows}, seed)

        # In the order of the rows, as before the split.
        def list_stays(patients: Sequence[str]) -> tuple[str, ...]:
            chosen = frozenset(patients)
            return tuple(stays.ids[row] for row in rows if stays.patients[row] in chosen)

        by_stay = Split(list_stays(split.train), list_stays(split.validation), list_stays(split.test))
        return build_examples(by_stay, lambda ids: self._build_dataset(stays, [row_of[name] for name in ids]))

    def _build_dataset(self, stays: Admissions, rows: Sequence[int]) -> TensorDataset:
        """Return the examples of ``rows``."""
        selected = np.array(rows, dtype=np.int64)
        died = torch.from_numpy(stays.died[selected]).float()[:, None]
        codes = encode_one_hot(stays.codes[selected], self.config.levels)
        return TensorDataset(torch.from_numpy(codes), died, self._compute_weights(died))

    def _compute_weights(self, died: Tensor) -> Tensor:
        """Return the weight of each example in the loss, shaped like ``died``."""
        weight = self.config.positive_weight
        if weight == "balanced":
            deaths = int(died.sum())
            weight = (len(died) - deaths) / deaths if deaths else 1.0
        return torch.ones_like(died) if weight == "none" else torch.where(died > 0, float(weight), 1.0)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the weighted binary cross-entropy, a scalar."""
        codes, died, weight = batch
        return functional.binary_cross_entropy_with_logits(model(codes.float()), died, weight=weight)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the risk of death and whether the patient died, both ``(B, 1)``."""
        codes, died, _ = batch
        return torch.sigmoid(model(codes.float())), died

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of :func:`compute_risk_metrics`."""
        return compute_risk_metrics(predictions.flatten(), targets.flatten())


def compute_risk_metrics(risk: Tensor, died: Tensor) -> dict[str, float]:
    """Return the discrimination and the calibration of predicted risks.

    * ``auc_roc``, ``auc_pr`` (average precision): omitted if all or none died;
    * ``brier``: mean squared error of the risk;
    * ``calibration_error``: mean distance between risk and share of deaths over ten bins of equal width, weighted by
      the number of stays;
    * ``prevalence``: share that died, the average precision of a random ranking.

    Args:
        risk: predicted probability of death, ``(n,)``.
        died: 0 or 1, ``(n,)``.
    """
    risk, died = risk.double(), died.double()
    metrics = {
        "brier": (risk - died).square().mean().item(),
        "calibration_error": _compute_calibration_error(risk, died),
        "prevalence": died.mean().item(),
    }
    if 0 < int(died.sum()) < len(died):
        metrics["auc_roc"] = compute_auc(risk, died)
        metrics["auc_pr"] = compute_average_precision(risk, died)
    return metrics


def _compute_calibration_error(risk: Tensor, died: Tensor) -> float:
    bin_of = (risk * BINS).long().clamp(0, BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bin_of, risk - died)
    return float(gaps.abs().sum() / len(risk))


def encode_one_hot(codes: np.ndarray, levels: int) -> np.ndarray:
    """Encode each code 0 to ``levels`` as ``levels`` inputs of 0 or 1; all are 0 for code 0.

    >>> encode_one_hot(np.array([[0, 2]], dtype=np.uint8), 2).tolist()
    [[0, 0, 0, 1]]
    >>> encode_one_hot(np.array([[0, 2]], dtype=np.uint8), 1).tolist()
    [[0, 1]]

    Returns:
        uint8 ``(n, medications * levels)``.
    """
    if levels == 1:
        return (codes > 0).astype(np.uint8)
    ones: np.ndarray = codes[:, :, None] == np.arange(1, levels + 1, dtype=np.uint8)
    return ones.reshape(len(codes), codes.shape[1] * levels).astype(np.uint8)


@lru_cache(maxsize=1)
def _read_cached(path: Path, columns: AdmissionColumns) -> Admissions:
    """Read the stays of a file, and keep them: the sites of a simulated federation share one file."""
    return read_admissions(path, columns)
