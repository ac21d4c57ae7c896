"""Description of the sites' columns: FLARE's workflow in this process, answered at three sites with their policies."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from described_site import DescribedSite
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable
from nvflare.app_common.app_constant import StatisticsConstants
from nvflare.app_common.statistics.numeric_stats import get_global_stats
from nvflare.app_common.utils.json_utils import ObjectEncoder

from flare_sparse.api.describe import build_record
from flare_sparse.config.schema import JobConfig
from flare_sparse.config.study import Study
from flare_sparse.flare.payload import get_refusal_code, is_statistics
from flare_sparse.flare.site.allow_list import CLASSES
from flare_sparse.flare.statistics import (
    LEAST,
    DescriptionRecipe,
    StatisticsExecutor,
    build_controller,
    read_statistics,
)
from flare_sparse.results.report.describe import write_description
from flare_sparse.rounds.endpoints.egress import EGRESS_FOLDER, read_log

TASK = StatisticsConstants.FED_STATS_TASK
PHASES = (StatisticsConstants.STATS_1st_STATISTICS, StatisticsConstants.STATS_2nd_STATISTICS)


def write_study(folder: Path) -> JobConfig:
    """Write a study of heights, ages and a disease, and return its job."""
    content = {
        "name": "study",
        "seed": 1,
        "permit": "EA 1",
        "method": {"name": "fedavg", "rounds": 1},
        "task": {
            "name": "table", "kind": "binary", "target": "sick", "features": ["age", "height", "sex"],
            "categories": {"sex": ["F", "M"]}, "missing": "impute", "id": "id",
        },
    }  # fmt: skip
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return Study.load(folder / "study.yaml").config.job


def make_site(
    folder: Path, job: JobConfig, rows: list[list[Any]], policy: dict[str, Any] | None = None
) -> DescribedSite:
    """Return a site with a table of its own."""
    folder.mkdir(parents=True)
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "age", "height", "sex", "sick"], *rows])
    return DescribedSite(folder, job, folder / "table.csv", StatisticsExecutor(10), policy)


def make_rows(site: str, count: int, *, centimetres: bool = True, sick: bool = False) -> list[list[Any]]:
    generator = np.random.default_rng(count)
    age, height = generator.normal(60, 10, count).round(1), generator.normal(170, 8, count).round(1)
    return [
        [
            f"{site}-{row}",
            "" if row < 12 else age[row],
            height[row] if centimetres else height[row] / 100,
            "FM"[row % 2],
            1 if sick else row % 3 // 2,
        ]
        for row in range(count)
    ]


def describe(sites: list[DescribedSite], job_filter: Any = lambda result: result) -> Any:
    """Drive FLARE's workflow through its two tasks and return the file that it writes."""
    controller = build_controller()
    for phase in PHASES:
        for site in sites:
            task = controller._prepare_inputs(phase)
            task = SimpleNamespace(name="fed_stats", props={StatisticsConstants.STATISTICS_TASK_KEY: phase}, data=task)
            result = site.answer(TASK, task.data, job_filter)
            assert result.get_return_code() == ReturnCode.OK, site.read_error()
            client_task = SimpleNamespace(client=SimpleNamespace(name=site.folder.name), task=task, result=result)
            controller.results_cb(client_task, site.fl_ctx)
        controller.global_statistics = get_global_stats(
            controller.global_statistics, controller.client_statistics, phase, controller.statistic_configs,
            controller.precision,
        )  # fmt: skip
    return json.loads(json.dumps(controller._combine_all_statistics(), cls=ObjectEncoder))


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return write_study(tmp_path)


@pytest.fixture
def sites(tmp_path: Path, job: JobConfig) -> list[DescribedSite]:
    return [
        make_site(tmp_path / "A", job, make_rows("A", 120)),
        make_site(tmp_path / "B", job, make_rows("B", 90, sick=True)),
        make_site(tmp_path / "C", job, make_rows("C", 60, centimetres=False), {"min_examples": 20}),
    ]


@pytest.mark.slow
def test_columns_are_described_by_site_with_the_warnings_that_decide(
    tmp_path: Path, sites: list[DescribedSite]
) -> None:
    record = build_record("study", 10, read_statistics(describe(sites)))
    assert record["sites"] == ["A", "B", "C"]
    ages = record["columns"]["age"]
    assert {site: own["count"] for site, own in ages.items()} == {"A": 108, "B": 78, "C": 48}
    # 12 missing values are fewer than C's policy asks for.
    assert {site: round(own["mean"] * own["count"]) for site, own in record["columns"]["age=missing"].items()} == {
        "A": 12, "B": 12,
    }  # fmt: skip
    for site in sites:
        table = np.genfromtxt(site.folder / "table.csv", delimiter=",", skip_header=1, usecols=1)
        values, own = table[~np.isnan(table)], ages[site.folder.name]
        assert own["mean"] == pytest.approx(values.mean())
        assert own["stddev"] == pytest.approx(values.std())
        assert own["quantile"]["50"] == pytest.approx(np.median(values), abs=1)
        low, high = min(cell[0] for cell in own["histogram"]), max(cell[1] for cell in own["histogram"])
        assert values.min() < low < high < values.max()
        fewest = 20 if site.folder.name == "C" else 10
        assert all(cell[2] >= fewest for cell in own["histogram"])
        assert sum(cell[2] for cell in own["histogram"]) == own["count"]
    assert [warning.split(";")[0] for warning in record["warnings"]] == [
        "sick: B has 1 alone",
        "height: the mean of C is 1.71, and 169.6 at the other sites: is it in another unit?",
    ]
    page, picture = write_description(record, tmp_path / "page")
    text = page.read_text()
    assert all(warning.split(":")[1].strip() in text for warning in record["warnings"])
    assert "No site sent a figure of fewer than 10 rows" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_answer_has_a_line_in_the_egress_log_with_the_permit(sites: list[DescribedSite]) -> None:
    describe(sites)
    lines = read_log(sites[0].folder / EGRESS_FOLDER / "A")
    assert [(line["job"], line["permit"], line["contents"]) for line in lines] == [
        ("study", "EA 1", ["statistics"]),
        ("study", "EA 1", ["statistics"]),
    ]
    assert all(line["bytes"] > 100 for line in lines)


def test_filter_of_the_job_changes_nothing_that_leaves(sites: list[DescribedSite]) -> None:
    def add(result: Shareable) -> Shareable:
        result["DXO"]["data"]["more"] = b"rows"
        result.set_header("more", "rows")
        return result

    task = build_controller()._prepare_inputs(PHASES[0])
    plain, changed = sites[0].answer(TASK, task), sites[0].answer(TASK, task, add)
    assert from_shareable(changed).data == from_shareable(plain).data
    assert is_statistics(changed)
    assert changed.get_header("more") is None


@pytest.mark.parametrize(
    ("policy", "term"),
    [
        ({"contents": ["weights", "metrics"]}, "contents: statistics may not leave"),
        ({"permit": "EA 2"}, "permit: this site takes part under 'EA 2'"),
        ({"encrypted": True}, "encrypted: statistics would leave without it"),
        ({"masked": True}, "masked: statistics would leave without it"),
        ({"epsilon": 8}, "epsilon: statistics would leave without it"),
        ({"clip_norm": 1, "noise": 0.1}, "noise: statistics would leave without it"),
        ({"min_examples": 121}, "no column has 121 rows"),
    ],
)
def test_policy_keeps_statistics_at_the_site(policy: dict[str, Any], term: str, tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120), policy)
    result = site.answer(TASK, build_controller()._prepare_inputs(PHASES[0]))
    assert get_refusal_code(result) in ("E_POLICY", "E_DATA")
    assert "DXO" not in result
    assert term in site.read_error()


def test_guard_refuses_too_many_bytes(tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120), {"max_upload_bytes": 200})
    assert get_refusal_code(site.answer(TASK, build_controller()._prepare_inputs(PHASES[0]))) == "E_POLICY"
    assert "max_upload_bytes: the statistics have" in site.read_error()


def test_job_cannot_ask_for_figures_of_few_rows(tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", LEAST - 1))
    site.executor = StatisticsExecutor(1)
    assert get_refusal_code(site.answer(TASK, build_controller()._prepare_inputs(PHASES[0]))) == "E_DATA"
    assert f"no column has {LEAST} rows" in site.read_error()


def test_such_a_job_carries_no_code_and_sites_run_no_class_of_flare(tmp_path: Path, job: JobConfig) -> None:
    DescriptionRecipe(job, 10).export(str(tmp_path / "jobs"))
    assert not list((tmp_path / "jobs").glob("**/*.py"))
    (file,) = (tmp_path / "jobs").glob("**/config_fed_client.json")
    content = json.loads(file.read_text())
    assert [part["executor"]["path"] for part in content["executors"]] == [
        "flare_sparse.flare.statistics.StatisticsExecutor"
    ]
    assert content["executors"][0]["executor"]["path"] in CLASSES
    assert not content["components"]
    assert not content["task_result_filters"]
