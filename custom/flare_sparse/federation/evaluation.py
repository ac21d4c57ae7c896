"""Metrics of the models of a run, and the best one of these models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..aggregation.weighted import cap
from ..endpoints.reported import TEST_EXAMPLES
from ..exchange import Contribution, EncryptedValues
from ..mask import Mask


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model.

    Attributes:
        overall: over the test examples of all sites.
        sites: by site; those of a site without test examples are empty.
    """

    overall: dict[str, float]
    sites: dict[str, dict[str, float]]

    @classmethod
    def from_contributions(cls, contributions: Sequence[Contribution], max_share: float = 1.0) -> Evaluation:
        """Return the means of the sites' metrics, weighted by test examples.

        For metrics that are means over examples, such as MAE and accuracy, this is the value over all examples.

        Args:
            contributions: contributions, with or without metrics.
            max_share: largest share of a mean that one site may have.
        """
        reported = {contribution.site: contribution.metrics for contribution in contributions}
        # No site reports metrics with scores. Otherwise a site without any has no test examples, and stays visible.
        sites = reported if any(reported.values()) else {}
        total = sum(_cap_test_examples([metrics for metrics in sites.values() if metrics], max_share))
        names = sorted({name for metrics in sites.values() for name in metrics} - {TEST_EXAMPLES})
        overall = {}
        for name in names:
            # A site may lack a metric, such as the AUC of a single class: its examples do not count then.
            present = [metrics for metrics in sites.values() if name in metrics]
            weights = _cap_test_examples(present, max_share)
            weighted = sum(metrics[name] * weight for metrics, weight in zip(present, weights, strict=True))
            overall[name] = weighted / sum(weights)
        return cls({**overall, TEST_EXAMPLES: total} if sites else {}, sites)


def _cap_test_examples(metrics: list[dict[str, float]], max_share: float) -> list[float]:
    """Return the number of test examples that each site's metrics are weighted by."""
    return cap([values.get(TEST_EXAMPLES, 1.0) for values in metrics], max_share)


@dataclass(frozen=True)
class BestModel:
    """The best committed model so far by the task's metric.

    Attributes:
        round: round of the model; -1: none was evaluated yet.
        metrics: overall metrics.
        weights: ``(P,)``; NaN where the server cannot read them.
        mask: live entries.
        encrypted: the values, if the server cannot read them.
    """

    round: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    weights: Tensor | None = None
    mask: Mask | None = None
    encrypted: EncryptedValues | None = None
