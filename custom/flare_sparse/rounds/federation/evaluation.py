"""Metrics of the models of a run, and the best one of these models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...cohorts.subgroups import split_metric
from ...core.exchange import Contribution, Patch, SealedValues
from ...core.mask import Mask
from ...methods.aggregation.weighted import cap
from ...tasks.task import COUNTS, EPSILON, TEST_EXAMPLES, get_count_name


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model.

    Attributes:
        overall: over the test examples of all sites, and with the prefix ``validation_`` over the validation examples.
        sites: by site; those of a site without test and validation examples are empty.
    """

    overall: dict[str, float]
    sites: dict[str, dict[str, float]]

    @classmethod
    def from_contributions(cls, contributions: Sequence[Contribution], max_share: float = 1.0) -> Evaluation:
        """Return the means of the sites' metrics, weighted by test or validation examples.

        For metrics that are means over examples, such as MAE and accuracy, this is the value over all examples. For
        others, such as AUC, it is a mean of values within sites; predictions of single examples never reach the server.

        Args:
            contributions: contributions, with or without metrics.
            max_share: largest share of a mean that one site may have.
        """
        reported = {
            contribution.site: {name: value for name, value in contribution.metrics.items() if name != EPSILON}
            for contribution in contributions
        }
        # No site reports metrics with scores. Otherwise a site without any has no test examples, and stays visible.
        return cls._from_site_metrics(reported if any(reported.values()) else {}, max_share)

    @classmethod
    def _from_site_metrics(cls, sites: Mapping[str, dict[str, float]], max_share: float) -> Evaluation:
        names = {name for metrics in sites.values() for name in metrics} - set(COUNTS)
        # Those of subgroups are weighted by the subjects of the subgroup, where a report reads them by site.
        names = {name for name in names if split_metric(name) is None}
        overall = {}
        for name in sorted(names):
            # A site may lack a metric, such as the AUC of a single class: its examples do not count then.
            present = [metrics for metrics in sites.values() if name in metrics]
            weights = _cap_examples(present, get_count_name(name), max_share)
            weighted = sum(metrics[name] * weight for metrics, weight in zip(present, weights, strict=True))
            overall[name] = weighted / sum(weights)
        for count in COUNTS:
            present = [metrics for metrics in sites.values() if any(get_count_name(name) == count for name in metrics)]
            if present or (sites and count == TEST_EXAMPLES):
                overall[count] = sum(_cap_examples(present, count, max_share))
        return cls(overall, dict(sites))

    def select_sites(self, sites: Collection[str], max_share: float = 1.0) -> Evaluation:
        """Return the evaluation at some of the sites."""
        selected = {site: metrics for site, metrics in self.sites.items() if site in sites}
        return self._from_site_metrics(selected, max_share)

    def list_sites_with(self, name: str) -> set[str]:
        """Return the sites that reported a metric."""
        return {site for site, metrics in self.sites.items() if name in metrics}

    def count_examples(self, name: str) -> float:
        """Return the number of examples that a metric was computed from, over all sites."""
        return sum(self.sites[site].get(get_count_name(name), 1.0) for site in self.list_sites_with(name))


def _cap_examples(metrics: list[dict[str, float]], count: str, max_share: float) -> list[float]:
    """Return the number of examples that each site's metrics are weighted by."""
    return cap([values.get(count, 1.0) for values in metrics], max_share)


@dataclass(frozen=True)
class BestModel:
    """The best committed model so far by the task's metric on the validation examples of all sites.

    Test examples choose nothing: a metric on examples that chose the model is too good.

    Attributes:
        round: round of the model; -1: no model was evaluated on validation examples.
        evaluation: metrics of the model.
        values: ``(mask.count,)``; NaN where the server cannot read them.
        mask: live entries; all others are zero.
        sealed: the values, if the server cannot read them.
    """

    round: int = -1
    evaluation: Evaluation = field(default_factory=lambda: Evaluation({}, {}))
    values: Tensor | None = None
    mask: Mask | None = None
    sealed: SealedValues | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Overall metrics."""
        return self.evaluation.overall

    @property
    def model(self) -> Patch | None:
        """The model, over zeros; None: none was evaluated yet."""
        return None if self.values is None or self.mask is None else Patch(self.values, self.mask)
