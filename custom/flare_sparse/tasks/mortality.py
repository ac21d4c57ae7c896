"""Death in hospital from the medications of a stay (SCBF, section 4.1): multi-hot codes, one logit."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ..data.admissions import Admissions, Wanted, read_admissions
from ..data.split import train_test
from ..errors import DataError
from ..models import ModelConfig
from ..models.config import reading
from ..task import Cohort, Examples, Metric, SiteData, Task, TaskConfig

BINS = 10


class MortalityConfig(TaskConfig):
    """What a stay looks like; every site must have the same medications in the same order."""

    model: Annotated[ModelConfig, reading("features")] = Field(
        ModelConfig(name="mlp", hidden=(64, 32)), description="network, with its settings"
    )
    medications: int = Field(2917, ge=1, le=1_000_000, description="number of medication codes")
    levels: int = Field(1, ge=1, le=255, description="a code's values; more than 1: one input for each, such as doses")
    codes: str = Field("med", description="array of the codes in an .npz file; of a table, the prefix of their columns")
    outcome: str = Field("died", description="1 died, 0 survived; stays with anything else are left out")
    stay: str | None = Field("stay", description="column of identifiers; null: the number of the row")
    patient: str | None = Field(None, description="column; all stays of a patient are for training, or all for testing")
    only: str | None = Field(None, description="column; only rows where it is 1 are used")
    positive_weight: Literal["none", "balanced"] | float = Field(
        "none",
        description="weight of a death in the loss; balanced: survivors over deaths of the site's own training stays. "
        "It changes what a probability means: see calibration_error",
    )
    test_share: float = Field(0.2, gt=0, lt=1, description="share of the patients that is for testing")

    @property
    def wanted(self) -> Wanted:
        """What to read of a file."""
        return Wanted(self.outcome, self.codes, self.stay, self.patient, self.only)


class Mortality(Task):
    """Batches are (codes (B, inputs) uint8, died (B, 1), weight (B, 1))."""

    Config = MortalityConfig
    config: MortalityConfig
    metric = Metric("auc_roc", "", "max")

    def model(self) -> nn.Module:
        """The configured network with one output, the logit of dying."""
        return self.config.model.build(features=self.config.medications * self.config.levels, outputs=1)

    def cohort(self, path: Path) -> Cohort:
        """The usable stays with everything that the file has one value a stay of."""
        return _read(path, self.config.wanted).cohort

    def load(self, data: SiteData, seed: int) -> Examples:
        """The stays of a site."""
        stays = _read(data.path, self.config.wanted)
        if stays.codes.shape[1] != self.config.medications:
            raise DataError(
                f"{data.path}: {stays.codes.shape[1]} medications; task.medications says {self.config.medications}. All "
                "sites must use one vocabulary"
            )
        place = {name: row for row, name in enumerate(stays.ids)}
        rows = np.array([place[n] for n in data.subset if n in place] if data.subset is not None else [*place.values()])
        if data.subset is not None and len(rows) < len(data.subset):
            raise DataError(f"{data.path}: {len(data.subset) - len(rows)} of {len(data.subset)} stays are not in it")
        train, test = train_test({stays.patients[row] for row in rows}, seed, self.config.test_share)
        return Examples(self._part(stays, rows, frozenset(train)), self._part(stays, rows, frozenset(test)))

    def _part(self, stays: Admissions, rows: np.ndarray, patients: frozenset[str]) -> TensorDataset:
        chosen = np.array([row for row in rows if stays.patients[row] in patients], dtype=np.int64)
        died = torch.from_numpy(stays.died[chosen]).float()[:, None]
        return TensorDataset(
            torch.from_numpy(one_hot(stays.codes[chosen], self.config.levels)), died, self._weights(died)
        )

    def _weights(self, died: Tensor) -> Tensor:
        weight = self.config.positive_weight
        if weight == "balanced":
            deaths = int(died.sum())
            weight = (len(died) - deaths) / deaths if deaths else 1.0
        return torch.ones_like(died) if weight == "none" else torch.where(died > 0, float(weight), 1.0)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Binary cross-entropy, each stay with its weight."""
        codes, died, weight = batch
        return functional.binary_cross_entropy_with_logits(model(codes.float()), died, weight=weight)

    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Probability of dying and whether the patient died, both (B, 1)."""
        codes, died, _ = batch
        return torch.sigmoid(model(codes.float())), died

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """As :func:`risk_figures`."""
        return risk_figures(predictions.flatten(), targets.flatten())


def risk_figures(risk: Tensor, died: Tensor) -> dict[str, float]:
    """How well a risk ranks and how far it can be taken at its word.

    ``auc_roc`` and ``auc_pr`` (average precision) are left out where all or none died. ``brier`` is the mean squared
    error of the risk; ``calibration_error`` the mean distance between risk and deaths over ten bins of equal width,
    weighted by their stays; ``prevalence`` the share that died: an average precision is to be read against it.

    Args:
        risk: probability of dying ``(n,)``.
        died: 0 or 1, ``(n,)``.
    """
    risk, died = risk.double(), died.double()
    figures = {
        "brier": (risk - died).square().mean().item(),
        "calibration_error": _calibration_error(risk, died),
        "prevalence": died.mean().item(),
    }
    if 0 < int(died.sum()) < len(died):
        from monai.metrics import compute_average_precision, compute_roc_auc

        figures["auc_roc"] = float(compute_roc_auc(risk, died))
        figures["auc_pr"] = float(compute_average_precision(risk, died))
    return figures


def _calibration_error(risk: Tensor, died: Tensor) -> float:
    place = (risk * BINS).long().clamp(0, BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, risk - died)
    return float(gaps.abs().sum() / len(risk))


def one_hot(codes: np.ndarray, levels: int) -> np.ndarray:
    """Codes 0 to ``levels`` as ``levels`` inputs of 0 or 1 each, ``(n, medications * levels)``.

    >>> one_hot(np.array([[0, 2]], dtype=np.uint8), 2).tolist()
    [[0, 0, 0, 1]]
    >>> one_hot(np.array([[0, 2]], dtype=np.uint8), 1).tolist()
    [[0, 1]]
    """
    if levels == 1:
        return (codes > 0).astype(np.uint8)
    ones: np.ndarray = codes[:, :, None] == np.arange(1, levels + 1, dtype=np.uint8)
    return ones.reshape(len(codes), codes.shape[1] * levels).astype(np.uint8)


@lru_cache(maxsize=1)
def _read(path: Path, wanted: Wanted) -> Admissions:
    """The sites of a simulated federation share a file: it is read once."""
    return read_admissions(path, wanted)
