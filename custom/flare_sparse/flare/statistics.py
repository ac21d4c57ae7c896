"""Federated statistics of the sites' columns: FLARE's own workflow, answered by this package at each site."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.statistics_spec import Bin, DataType, Feature, Histogram, HistogramType, Statistics
from nvflare.app_common.app_constant import StatisticsConstants
from nvflare.app_common.executors.statistics.statistics_task_handler import StatisticsTaskHandler
from nvflare.app_common.statistics.json_stats_file_persistor import JsonStatsFileWriter
from nvflare.app_common.workflows.statistics_controller import StatisticsController
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from ..config.loading import serialize_job
from ..config.policy.policy import Policy, raise_refusals
from ..config.schema import JobConfig, build_task
from ..config.yaml_files import format_yaml
from ..core.errors import ConfigError, DataError, get_failure_code
from ..tasks.columns import compute_quantile, compute_range, count_cells, encode_columns, list_columns
from ..tasks.data.source import find_site_data
from ..tasks.task import SiteData
from .egress import install_recorder
from .payload import build_refusal
from .session import read_job, read_site_policy
from .workspace import JOB_FILE, get_workspace, write_site_error

RESULT = "statistics/columns.json"
"""File of the statistics in the server's folder of the job."""
QUANTILES = (5, 25, 50, 75, 95)
"""Quantiles, in percent."""
LEAST = 5
"""Fewest rows that a job may ask for: a site computes no figure from fewer, whatever its policy."""
_DATASET = "site"
"""The one data set of each site, in FLARE's words."""
_WRITER = "writer"
_BINS = 15
_PRECISION = 9
"""Decimals; FLARE's default of 4 would round a column of small numbers to 0."""


class DescriptionRecipe(Recipe):
    """A job of FLARE's workflow of federated statistics that runs also where a site's guards refuse other packages.

    Args:
        config: the study's settings, whose task reads the data.
        least: fewest rows from which a figure is computed.
    """

    def __init__(self, config: JobConfig, least: int):
        job = FedJob(name=config.name, min_clients=config.federation.min_sites)
        super().__init__(job)
        job.to_server(build_controller(), id="controller")
        job.to_server(JsonStatsFileWriter(RESULT), id=_WRITER)
        job.to_clients(StatisticsExecutor(least), tasks=[StatisticsConstants.FED_STATS_TASK])
        add_job_file(self, job, config)


def add_job_file(recipe: Recipe, job: FedJob, config: JobConfig) -> None:
    """Add the study's settings, which the sites and their guards read, to a job that carries no code."""
    # The sites have the package: otherwise the job would carry all of it, as code that sites may refuse.
    job.set_app_packages(["flare_sparse"])
    # FLARE copies added files only at export or submission, so they must exist as long as the recipe.
    folder = Path(tempfile.mkdtemp(prefix="flare-sparse-"))
    weakref.finalize(recipe, shutil.rmtree, folder, ignore_errors=True)
    (folder / JOB_FILE).write_text(format_yaml(serialize_job(config)))
    job.add_file_to_clients(str(folder / JOB_FILE), app_folder_type="config")


def build_controller() -> StatisticsController:
    """Return FLARE's controller of the workflow with the statistics that a description asks for."""
    configs: dict[str, dict[str, Any]] = {
        StatisticsConstants.STATS_COUNT: {},
        StatisticsConstants.STATS_SUM: {},
        StatisticsConstants.STATS_MEAN: {},
        StatisticsConstants.STATS_STDDEV: {},
        StatisticsConstants.STATS_QUANTILE: {"*": list(QUANTILES)},
        StatisticsConstants.STATS_HISTOGRAM: {"*": {StatisticsConstants.STATS_BINS: _BINS}},
    }
    return StatisticsController(configs, writer_id=_WRITER, precision=_PRECISION, enable_pre_run_task=False)


class StatisticsExecutor(Executor):
    """Computes the statistics of a site's columns that FLARE's workflow asks for, each from enough rows.

    Args:
        least: fewest rows; ``LEAST`` or the site's policy (``min_examples``) may ask for more.
    """

    def __init__(self, least: int):
        super().__init__()
        self.least = least
        self._handler: StatisticsTaskHandler | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Log what leaves, from the start of the job."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            install_recorder(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Return the statistics, or a refusal with the error code only; its text stays at the site."""

        def compute() -> Mapping[str, Any]:
            if self._handler is None:
                self._handler = StatisticsTaskHandler(generator_id="", precision=_PRECISION)
                self._handler.stats_generator = self._read_statistics(fl_ctx)
            return dict(self._handler.execute_task(task_name, shareable, fl_ctx, abort_signal))

        return answer_with_statistics(compute, fl_ctx)

    def _read_statistics(self, fl_ctx: FLContext) -> ColumnStatistics:
        """Read the site's data, if its policy lets statistics leave."""
        policy, data = open_described_data(fl_ctx)
        least = max(self.least, policy.min_examples, LEAST)
        columns = list_columns(build_task(read_job(fl_ctx)), data)
        if not (values := encode_columns(columns, least)):
            raise DataError(f"no column has {least} rows, the fewest from which this site computes a figure")
        return ColumnStatistics(values, least)


def open_described_data(fl_ctx: FLContext) -> tuple[Policy, SiteData]:
    """Return the site's policy and the place of its data, if the policy lets statistics of a job leave.

    Raises:
        PolicyRefusal: it does not.
        DataError: the site names no data.
    """
    policy = read_site_policy(fl_ctx)
    raise_refusals(policy.check_description(permit=read_job(fl_ctx).permit))
    local = Path(get_workspace(fl_ctx).get_site_config_dir())
    return policy, find_site_data(fl_ctx.get_identity_name(), local)


def answer_with_statistics(compute: Callable[[], Mapping[str, Any]], fl_ctx: FLContext) -> Shareable:
    """Return what ``compute`` returns as statistics, or a refusal with the error code only; its text stays here."""
    try:
        return DXO(DataKind.STATISTICS, data=dict(compute())).to_shareable()
    except Exception as error:  # noqa: BLE001 - whatever reading a user's data raises
        code = get_failure_code(error)
        write_site_error(error, code, fl_ctx)
        return build_refusal(code, ReturnCode.EXECUTION_EXCEPTION)


class ColumnStatistics(Statistics):
    """Statistics of columns in FLARE's form.

    Args:
        values: ``(n,)`` values by column, of at least ``least`` rows each.
        least: fewest rows from which a figure is computed.
    """

    def __init__(self, values: Mapping[str, np.ndarray], least: int):
        super().__init__()
        self._values, self._least = values, least

    def features(self) -> dict[str, list[Feature]]:
        return {_DATASET: [Feature(name, DataType.FLOAT) for name in self._values]}

    def count(self, dataset_name: str, feature_name: str) -> int:
        return len(self._values[feature_name])

    def sum(self, dataset_name: str, feature_name: str) -> float:
        return float(self._values[feature_name].sum())

    def stddev(self, dataset_name: str, feature_name: str) -> float:
        return float(self._values[feature_name].std())

    def variance_with_mean(
        self, dataset_name: str, feature_name: str, global_mean: float, global_count: float
    ) -> float:
        return float(((self._values[feature_name] - global_mean) ** 2).sum() / max(global_count - 1, 1))

    def min_value(self, dataset_name: str, feature_name: str) -> float:
        return compute_range(self._values[feature_name], self._least)[0]

    def max_value(self, dataset_name: str, feature_name: str) -> float:
        return compute_range(self._values[feature_name], self._least)[1]

    def quantiles(self, dataset_name: str, feature_name: str, percentiles: list[int]) -> dict[str, dict[int, float]]:
        values = self._values[feature_name]
        found = {percent: compute_quantile(values, percent / 100, self._least) for percent in percentiles}
        return {
            StatisticsConstants.STATS_QUANTILE: {share: value for share, value in found.items() if value is not None}
        }

    def histogram(
        self, dataset_name: str, feature_name: str, num_of_bins: int, global_min_value: float, global_max_value: float
    ) -> Histogram:
        # A constant column at every site has a range of no width.
        high = max(global_max_value, float(np.nextafter(global_min_value, np.inf)))
        edges = np.linspace(global_min_value, high, num_of_bins + 1)
        cells = count_cells(self._values[feature_name], edges, self._least)
        return Histogram(HistogramType.STANDARD, [Bin(*cell) for cell in cells])


def read_statistics(content: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return FLARE's record of statistics by column and site: count, mean, deviation, quantiles and histogram.

    Args:
        content: what FLARE's workflow writes, by column, statistic, site and data set.

    Raises:
        ConfigError: it is of another form.
    """
    columns: dict[str, dict[str, dict[str, Any]]] = {}
    try:
        for column, statistics in content.items():
            for name, sites in statistics.items():
                for site, datasets in sites.items():
                    if site != StatisticsConstants.GLOBAL:
                        columns.setdefault(column, {}).setdefault(site, {})[name] = datasets[_DATASET]
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"the statistics of FLARE's workflow are of an unknown form: {error!r}") from error
    # FLARE's order is that in which the sites answered.
    return {column: dict(sorted(by_site.items())) for column, by_site in columns.items()}
