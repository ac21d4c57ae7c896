"""Federated statistics of the sites' columns: one question, which each site answers with figures of its own rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config.policy.policy import Policy
from ..config.schema import JobConfig, build_task
from ..core.errors import DataError
from ..tasks.columns import BINS, LEAST, QUANTILES, Description, compute_figures, encode_columns, list_columns
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

    def compute(self, job: JobConfig, policy: Policy, data: SiteData) -> str:
        least = max(self.least, policy.min_examples, LEAST)
        if not (values := encode_columns(list_columns(build_task(job), data), least)):
            raise DataError(f"no column has {least} rows, the fewest from which this site computes a figure")
        return Description({name: compute_figures(column, least) for name, column in values.items()}).model_dump_json()


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
