"""What the generic table task predicts: a number, one of two classes, one of several, or the time of an event."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import DataError
from ..core.names import find_similar
from ..core.ranking import estimate_survival
from .classes import compute_cross_entropy, compute_risk_metrics
from .data.features import Labels, format_labels, name_labels, number_labels, read_labels
from .data.tables import Table
from .task import Kind, Metric


class NumberOutcome:
    """A number, which the network sees as ``(transformed value - center) / spread``."""

    kind: Kind = "regression"
    outputs = 1

    def __init__(self, target: str, unit: str, center: float, spread: float, *, is_logarithm: bool = False):
        self._target, self._center, self._spread, self._is_logarithm = target, center, spread, is_logarithm
        self.metric = Metric("mae", unit, "min")

    def read(self, table: Table) -> np.ndarray:
        """Return the numbers in the target's column.

        Raises:
            DataError: the logarithm of 1 and a number is undefined.
        """
        expected = "numbers above -1 for task.target_transform: log1p" if self._is_logarithm else ""
        return table.require_numbers(self._target, lambda x: x > (-1 if expected else -np.inf), expected)[:, None]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the smooth L1 error of the standardised value."""
        return functional.smooth_l1_loss(outputs, self.standardise(targets))

    def standardise(self, targets: Tensor) -> Tensor:
        """Return targets in the network's units."""
        return ((torch.log1p(targets) if self._is_logarithm else targets) - self._center) / self._spread

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the values in the target's own unit."""
        values = outputs * self._spread + self._center
        return torch.expm1(values) if self._is_logarithm else values

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return mean absolute, root mean squared and mean signed error, and R2 if the targets vary."""
        error, spread = (predictions - targets).double(), (targets - targets.mean()).double()
        metrics = {
            "mae": error.abs().mean().item(),
            "rmse": error.square().mean().sqrt().item(),
            "bias": error.mean().item(),
        }
        total = spread.square().sum().item()
        return {**metrics, "r2": 1 - error.square().sum().item() / total} if total else metrics


class ClassOutcome:
    """One of some labels: two have one output, the logit of the second; more have one output each."""

    def __init__(self, target: str, labels: Labels, class_weights: Sequence[float] = ()):
        self._target, self._labels, self._is_binary = target, labels, len(labels) == 2
        self._class_weights = class_weights
        self.kind: Kind = "binary" if self._is_binary else "classes"
        self.outputs = 1 if self._is_binary else len(labels)
        self.metric = (
            Metric("auc", "", "max", may_be_undefined=True) if self._is_binary else Metric("accuracy", "", "max")
        )

    def read(self, table: Table) -> np.ndarray:
        """Return the number of each row's label.

        Raises:
            DataError: a label is none of the known ones.
        """
        position = number_labels(self._labels)
        labels = read_labels(table, self._target, position)
        found = sorted({label for label in labels if label})
        if set(found) - set(position):
            shown = ", ".join(found[:10]) + (", ..." if len(found) > 10 else "")
            is_merged = len(position) > len(self._labels)
            classes = ", ".join(f"{name}: [...]" for name in name_labels(self._labels))
            remedy = f"{{{classes}}}" if is_merged else format_labels(found)
            if self._is_binary and not is_merged and len(found) > 2:
                remedy = "{no: [...], yes: [...]}, or task.kind: classes,"
            unknown = next(label for label in found if label not in position)
            similar = find_similar(unknown, position)
            both = f" ({unknown!r} is not {similar!r}: names are compared character by character)" if similar else ""
            raise DataError(
                f"{table.source}: column {self._target!r} has the labels {shown}{both}, but the job knows "
                f"{', '.join(position)}. Set task.classes: {remedy} with the labels of all sites, in the same order "
                "at every site; of two, the second is class 1"
            )
        return np.array([[position.get(label, np.nan)] for label in labels])

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy, the mean over examples with their weights."""
        if self._is_binary and not self._class_weights:
            return functional.binary_cross_entropy_with_logits(outputs, targets)
        logits = torch.cat([torch.zeros_like(outputs), outputs], dim=1) if self._is_binary else outputs
        return compute_cross_entropy(logits, targets[:, 0].long(), self._class_weights)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the probability of class 1, or of each class."""
        return torch.sigmoid(outputs) if self._is_binary else torch.softmax(outputs, dim=1)

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics of risks for two classes; the accuracy of more, overall and balanced over the classes."""
        if self._is_binary:
            return compute_risk_metrics(predictions.flatten(), targets.flatten())
        hits = (predictions.argmax(dim=1) == targets[:, 0]).double()
        recalls = [hits[targets[:, 0] == label].mean().item() for label in targets[:, 0].unique()]
        return {"accuracy": hits.mean().item(), "balanced_accuracy": sum(recalls) / len(recalls)}


Loss = Literal["cox", "discrete", "weibull"]
PAIRS_AT_ONCE = 2**20
"""Pairs of subjects that a C-index compares at a time."""


class SurvivalOutcome:
    """The time of an event, or the time until which a subject was seen without one.

    Targets are the time and 1 for an event. The last prediction is a risk, by which subjects are ranked; before it are
    the probabilities of no event until each of ``ends``. Cox's loss has the logarithm of a relative hazard only.

    Args:
        time: column of the times.
        event: column with 1 for an event.
        loss: the likelihood.
        ends: times ``(T,)`` at which probabilities are predicted, ascending; for ``discrete``, where intervals end.
    """

    kind: Kind = "survival"
    metric = Metric("c_index", "", "max", may_be_undefined=True)

    def __init__(self, time: str, event: str, loss: Loss = "cox", ends: Sequence[float] = ()):
        self._time, self._event, self._loss, self._ends = time, event, loss, torch.tensor(ends)
        self.outputs = {"cox": 1, "discrete": len(ends), "weibull": 2}[loss]

    def read(self, table: Table) -> np.ndarray:
        """Return times and events.

        Raises:
            DataError: a time is negative, or 0 with a Weibull loss, or an event neither 0 nor 1.
        """
        if self._loss == "weibull":
            times = table.require_numbers(self._time, lambda x: x > 0, "above 0")
        else:
            times = table.require_numbers(self._time, lambda x: x >= 0, "0 or more")
        events = table.require_numbers(self._event, lambda x: np.isin(x, (0, 1)), "1 for an event, else 0")
        return np.stack([times, events], axis=1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log-likelihood of the batch: per event for Cox's partial likelihood, else per subject.

        The risk set of an event in Cox's likelihood is that of its batch (Kvamme et al. 2019, JMLR 20:129, section
        3.1): the larger the batch, the closer to the partial likelihood of the site.
        """
        times, events = targets[:, 0], targets[:, 1]
        if self._loss == "cox":
            return compute_cox_loss(outputs[:, 0], times, events)
        if self._loss == "discrete":
            return compute_discrete_loss(self._shift(outputs), times, events, self._ends.to(times))
        return compute_weibull_loss(outputs, times / self._ends[-1].to(times), events)

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the survival at each of ``ends`` and the risk ``(B, T + 1)``; the log-hazard ``(B, 1)`` for Cox."""
        if self._loss == "cox":
            return outputs
        if self._loss == "discrete":
            cumulative = functional.softplus(self._shift(outputs)).cumsum(dim=1)
        else:
            cumulative = cumulate_weibull(outputs, (self._ends / self._ends[-1]).to(outputs))
        # The expected number of events, if every subject were followed for each of the times (Ishwaran et al. 2008,
        # Ann. Appl. Stat. 2:841, section 5.1): a rank where the hazards of two subjects cross.
        return torch.cat([torch.exp(-cumulative), cumulative.sum(dim=1, keepdim=True)], dim=1)

    def _shift(self, outputs: Tensor) -> Tensor:
        """Return logits of the hazards: at outputs of 0, 1/e of the subjects survive all intervals, as with Weibull."""
        return outputs + math.log(math.expm1(1 / self.outputs))

    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the share of events; Harrell's C-index where two subjects can be compared; errors of probabilities.

        ``ibs`` is the Brier score over the times, ``calibration_T`` the mean probability of an event until T minus the
        share by Kaplan and Meier. Times at which no subject is seen any more are left out.
        """
        times, events = targets[:, 0], targets[:, 1]
        metrics = {"event_rate": events.double().mean().item()}
        if (c_index := compute_c_index(predictions[:, -1], times, events)) is not None:
            metrics["c_index"] = c_index
        ends = self._ends.to(times)
        is_seen = ends < times.max()
        if self._loss == "cox" or not bool(is_seen.any()):
            return metrics
        survival, ends = predictions[:, :-1][:, is_seen], ends[is_seen]
        metrics["ibs"] = integrate(compute_brier_scores(survival, times, events, ends), ends)
        error = estimate_survival(times, events, ends) - survival.double().mean(dim=0)
        named = zip(ends.tolist(), error.tolist(), strict=True)
        return {**metrics, **{f"calibration_{end:g}": value for end, value in named}}


def compute_cox_loss(log_hazard: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Return the mean over events of ``log(sum of hazards at risk) - log hazard``; 0 without any event.

    Args:
        log_hazard: ``(B,)``.
        times: ``(B,)``.
        events: ``(B,)`` 1 for an event, 0 for the end of the observation.
    """
    at_risk = times[None, :] >= times[:, None]
    total = torch.logsumexp(torch.where(at_risk, log_hazard[None, :], -torch.inf), dim=1)
    # A batch without any event teaches nothing, but its loss must have a gradient.
    return ((total - log_hazard) * events).sum() / events.sum().clamp(min=1)


def compute_discrete_loss(logits: Tensor, times: Tensor, events: Tensor, ends: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of hazards in intervals (Kvamme and Borgan 2021, Lifetime Data Anal. 27).

    A subject adds ``log(1 - h)`` for each interval that it survived whole, and ``log h`` for the interval of its event.
    An interval in which it is censored adds nothing. After the last interval, an event counts as survival of all.

    Args:
        logits: of the hazards, ``(B, T)``.
        times: ``(B,)``.
        events: ``(B,)`` 1 for an event, 0 for censoring.
        ends: ends ``(T,)`` of the intervals; interval j is ``(ends[j-1], ends[j]]``, the first has no lower bound.
    """
    time, is_event = times[:, None], events[:, None] > 0.5
    survived = (ends < time) | ((ends == time) & ~is_event)
    starts = functional.pad(ends[:-1], (1, 0), value=-torch.inf)
    failed = is_event & (starts < time) & (time <= ends)
    losses = functional.softplus(logits) * survived + functional.softplus(-logits) * failed
    return losses.sum(dim=1).mean()


def compute_weibull_loss(outputs: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of Weibull distributions.

    Args:
        outputs: logarithms of scale and shape, ``(B, 2)``.
        times: ``(B,)``, above 0.
        events: ``(B,)`` 1 for an event, 0 for the end of the observation.
    """
    log_scale, log_shape = outputs.unbind(dim=1)
    power = log_shape.exp() * (times.log() - log_scale)
    return (power.exp() - events * (log_shape + power - times.log())).mean()


def cumulate_weibull(outputs: Tensor, ends: Tensor) -> Tensor:
    """Return the cumulative hazards ``(B, T)`` at ``ends (T,)``; see :func:`compute_weibull_loss`."""
    return torch.exp(outputs[:, 1:].exp() * (ends.log() - outputs[:, :1]))


def compute_c_index(log_hazard: Tensor, times: Tensor, events: Tensor) -> float | None:
    """Return the share of comparable pairs in which the subject with the earlier event has the higher hazard.

    Harrell et al. 1982, JAMA 247:2543; equal hazards count half. A pair is comparable if the earlier time is that of an
    event, or, of two equal times, one is that of an event. None without such a pair.
    """
    concordant, comparable = 0.0, 0
    # Process subjects with an event in chunks: all pairs of a large site do not fit into memory.
    for rows in (events > 0.5).nonzero().flatten().split(max(PAIRS_AT_ONCE // max(len(times), 1), 1)):
        own = times[rows, None]
        later = (times > own) | ((times == own) & (events <= 0.5))
        gap = log_hazard[rows, None] - log_hazard
        concordant += int(((gap > 0) & later).sum()) + 0.5 * int(((gap == 0) & later).sum())
        comparable += int(later.sum())
    return concordant / comparable if comparable else None


def compute_brier_scores(survival: Tensor, times: Tensor, events: Tensor, ends: Tensor) -> Tensor:
    """Return the Brier score ``(T,)`` at each time, weighted for censoring (Graf et al. 1999, Stat. Med. 18:2529).

    The distribution of censoring is that of the same subjects.

    Args:
        survival: probabilities ``(n, T)`` of no event until ``ends``.
        times: ``(n,)``.
        events: ``(n,)`` 1 for an event, 0 for the end of the observation.
        ends: ``(T,)``, each below the largest of ``times``.
    """
    own, common = (estimate_survival(times, events, at, of_censoring=True) for at in (times, ends))
    is_case = (times[:, None] <= ends) & (events[:, None] > 0.5)
    is_control = times[:, None] > ends
    # At the last time, the share that is still observed may be 0.
    weights = is_case / own.where(own > 0, torch.inf)[:, None] + is_control / common.where(common > 0, torch.inf)
    return ((survival.double() - is_control.double()).square() * weights).mean(dim=0)


def integrate(scores: Tensor, ends: Tensor) -> float:
    """Return the mean of ``scores (T,)`` over time, by trapezoids; of one time, its score."""
    if len(ends) < 2:
        return scores.item()
    return (torch.trapezoid(scores, ends.double()) / (ends[-1] - ends[0]).double()).item()
