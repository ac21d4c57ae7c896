"""Survival: the time of an event, or the time until which a subject was seen without one; losses and metrics."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..core.errors import DataError
from ..core.ranking import estimate_survival
from .data.tables import Table
from .outcomes import TableOutcome
from .task import Metric

Loss = Literal["cox", "discrete", "weibull"]
PAIRS_AT_ONCE = 2**20
"""Pairs of subjects that a C-index compares at a time."""


class SurvivalOutcome(TableOutcome):
    """The time of an event, or the time until which a subject was seen without one.

    Targets are the time and 1 for an event. The last prediction is a risk, by which subjects are ranked; before it are
    the probabilities of no event until each of ``ends``. Cox's loss has the logarithm of a relative hazard only.

    Args:
        time: column of the times.
        event: column with 1 for an event.
        loss: the likelihood.
        ends: times ``(T,)`` at which probabilities are predicted, ascending; for ``discrete``, where intervals end.
    """

    kind = "survival"
    metric = Metric("c_index", "", "max", may_be_undefined=True)

    def __init__(self, time: str, event: str, loss: Loss = "cox", ends: Sequence[float] = ()):
        self._time, self._event, self._loss, self._ends = time, event, loss, torch.tensor(ends)
        self.outputs = {"cox": 1, "discrete": len(ends), "weibull": 2}[loss]

    def read(self, table: Table) -> np.ndarray:
        """Return times and events.

        Raises:
            DataError: a time is negative, or 0 with a Weibull loss, or an event neither 0 nor 1.
        """
        times, events = table.get_numbers(self._time), table.get_numbers(self._event)
        is_wrong = times <= 0 if self._loss == "weibull" else times < 0
        if bool(is_wrong.any()):
            row, expected = int(np.flatnonzero(is_wrong)[0]), "above 0" if self._loss == "weibull" else "0 or more"
            raise DataError(
                f"{table.source}: column {self._time!r} is {times[row]:g} (row {row + 1}); expected {expected}"
            )
        known = events[np.isfinite(events)]
        if len(wrong := known[~np.isin(known, (0, 1))]):
            raise DataError(f"{table.source}: column {self._event!r} has {wrong[0]:g}; expected 1 for an event, else 0")
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
