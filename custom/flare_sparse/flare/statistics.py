"""Federated statistics of the sites' columns: one question, which each site answers with figures of its own rows."""

import math
from collections.abc import Mapping
from typing import Any

from ..config.people import ReleaseGate
from ..config.policy.policy import Policy
from ..config.schema import JobConfig, build_task
from ..core.errors import DataError
from ..privacy.release.site import compute_step
from ..results.runs.description import is_label
from ..tasks.columns import BINS, LEAST, QUANTILES, Description, Figures, compute_figures, encode_columns, list_columns
from ..tasks.task import SiteData
from .questions import QuestionController, QuestionExecutor, QuestionRecipe, build_question

RESULT = "statistics/columns.json"
"""File of the statistics in the server's folder of the job."""


class DescriptionRecipe(QuestionRecipe):
    """A job in which each site describes its columns.

    Args:
        config: the study's settings, whose task reads the data.
        least: fewest rows from which a figure is computed.
    """

    def __init__(self, config: JobConfig, least: int):
        executor, timeout_s = StatisticsExecutor(least), int(config.federation.task_timeout_s)
        super().__init__(config, executor, DescriptionController(build_question(executor), timeout_s))


class StatisticsExecutor(QuestionExecutor):
    """Computes figures of a site's columns, each from enough rows.

    Args:
        least: fewest rows; ``LEAST`` or the site's policy (``min_examples``) may ask for more.
    """

    kind = "describe"

    def __init__(self, least: int):
        super().__init__()
        self.least = least

    def list_terms(self) -> dict[str, Any]:
        return {"least": self.least, "quantiles": QUANTILES, "bins": BINS}

    def compute(self, job: JobConfig, policy: Policy, data: SiteData, gate: ReleaseGate | None) -> str:
        task, least = build_task(job), max(self.least, policy.min_examples, LEAST)
        if gate is not None:
            gate.bind(task, data)
            least = max(least, gate.rule.minimum)
        columns = list_columns(task, data)
        values = encode_columns(columns, least) if gate is None else encode_columns(columns, least, gate.bound_count)
        if not values:
            raise DataError(f"no column has {least} rows, the fewest from which this site computes a figure")
        # By name: labels come in the order of the rows, whose first one would show in the order of the answer.
        figures = {name: compute_figures(values[name], least) for name in sorted(values)}
        if gate is not None:
            figures = {name: coarsen_figures(name, own, gate) for name, own in figures.items()}
        return Description(figures).model_dump_json()


def coarsen_figures(name: str, figures: Figures, gate: ReleaseGate) -> Figures:
    """Return figures whose counts are rounded as released ones, and the others on the grid of the column.

    Of a label, such as ``sex=F``, the share of the rounded counts alone.
    """
    count = gate.round_count(name.partition("=")[0], figures.count)
    if is_label(name):
        share = min(gate.round_count(name, round(figures.mean * figures.count)) / count, 1.0)
        deviation = math.sqrt(share * (1 - share))
        return Figures(count=count, mean=share, stddev=deviation, quantile={}, histogram=())
    step = compute_step(gate.rule, figures.stddev, count)

    def snap(value: float) -> float:
        return round(value / step) * step if step else value

    edges = [snap(figures.histogram[0][0]), *(snap(high) for _, high, _ in figures.histogram)]
    counts = [gate.round_count(f"{name} {number}", cell[2]) for number, cell in enumerate(figures.histogram)]
    return Figures(
        count=count,
        mean=snap(figures.mean),
        stddev=snap(figures.stddev),
        quantile={percent: snap(value) for percent, value in figures.quantile.items()},
        histogram=tuple(zip(edges, edges[1:], counts, strict=False)),
    )


class DescriptionController(QuestionController[Description]):
    """Asks every site to describe its columns, checks each description, and writes them by column and site."""

    result = RESULT

    def parse(self, answer: bytes) -> Description:
        return Description.model_validate_json(answer)

    def join(self, answers: Mapping[str, Description]) -> dict[str, dict[str, Any]]:
        columns: dict[str, dict[str, Any]] = {}
        for site, description in answers.items():
            for name, figures in description.root.items():
                columns.setdefault(name, {})[site] = figures.model_dump(mode="json")
        return columns
