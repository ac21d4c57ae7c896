"""Description of the sites' columns: one question, answered at three sites with their policies, or by none."""

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
from nvflare.app_common.abstract.statistics_spec import StatisticConfig
from nvflare.app_common.app_constant import StatisticsConstants as Flare
from nvflare.app_common.statistics.statisitcs_objects_decomposer import fobs_registration
from nvflare.fuel.utils import fobs
from pydantic import ValidationError

from flare_sparse.api.describe import build_record
from flare_sparse.config.schema import JobConfig
from flare_sparse.config.study import Study
from flare_sparse.flare.payload import QUESTION, get_refusal_code, is_statistics, wrap
from flare_sparse.flare.questions import (
    ADMITTED,
    ANSWER,
    DescriptionController,
    FingerprintExecutor,
    StatisticsExecutor,
    build_question,
)
from flare_sparse.flare.recipe import QuestionRecipe
from flare_sparse.flare.session import REQUESTS_FOLDER
from flare_sparse.flare.site.setup import CLASSES
from flare_sparse.results.report.describe import write_description
from flare_sparse.rounds.endpoints.egress import EGRESS_FOLDER, read_chain
from flare_sparse.rounds.endpoints.request_log import read_record
from flare_sparse.tasks.columns import LEAST, Description


def ask(site: DescribedSite) -> Shareable:
    """Return the message of an honest server."""
    return wrap(QUESTION, build_question(site.executor))


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


def describe(sites: list[DescribedSite]) -> Any:
    """Ask every site the job's question, and return what the server writes."""
    controller = DescriptionController(build_question(sites[0].executor), 60)
    answers = {}
    for site in sites:
        result = site.answer(QUESTION, ask(site))
        assert result.get_return_code() == ReturnCode.OK, site.read_error()
        answers[site.folder.name] = controller.parse(from_shareable(result).data[ANSWER])
    return controller.join(answers)


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
    record = build_record("study", 10, describe(sites))
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
    lines = read_chain(sites[0].folder / EGRESS_FOLDER / "A")[0]
    assert [(line["job"], line["permit"], line["contents"]) for line in lines] == [
        ("study", "EA 1", ["statistics"]),
    ]
    assert all(line["bytes"] > 100 for line in lines)


def test_filter_of_the_job_changes_nothing_that_leaves(sites: list[DescribedSite]) -> None:
    def add(result: Shareable) -> Shareable:
        result["DXO"]["data"]["more"] = b"rows"
        result.set_header("more", "rows")
        return result

    plain, changed = (sites[0].answer(QUESTION, ask(sites[0]), *added) for added in ((), (add,)))
    assert from_shareable(changed).data == from_shareable(plain).data
    assert is_statistics(changed)
    assert changed.get_header("more") is None


@pytest.mark.parametrize(
    ("policy", "term"),
    [
        ({"contents": ["weights", "metrics"]}, "contents: statistics may not leave"),
        ({"permit": "EA 2"}, "permit: this site takes part under 'EA 2'"),
        ({"masked": True}, "masked: statistics would leave without it"),
        ({"epsilon": 8}, "epsilon: statistics would leave without it"),
        ({"clip_norm": 1, "noise": 0.1}, "noise: statistics would leave without it"),
        ({"min_examples": 121}, "no column has 121 rows"),
    ],
)
def test_policy_keeps_statistics_at_the_site(policy: dict[str, Any], term: str, tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120), policy)
    result = site.answer(QUESTION, ask(site))
    assert get_refusal_code(result) in ("E_POLICY", "E_DATA")
    assert "DXO" not in result
    assert term in site.read_error()


def test_guard_refuses_too_many_bytes(tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120), {"max_upload_bytes": 200})
    assert get_refusal_code(site.answer(QUESTION, ask(site))) == "E_POLICY"
    assert "max_upload_bytes: the statistics have" in site.read_error()


def test_job_cannot_ask_for_figures_of_few_rows(tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", LEAST - 1))
    site.executor = StatisticsExecutor(1)
    assert get_refusal_code(site.answer(QUESTION, ask(site))) == "E_DATA"
    assert f"no column has {LEAST} rows" in site.read_error()


def ask_flare(targets: list[StatisticConfig], **inputs: Any) -> Shareable:
    """Return a task of FLARE's own workflow of statistics, through FLARE's serializer."""
    fobs_registration()
    request = Shareable()
    request[Flare.STATISTICS_TASK_KEY] = Flare.STATS_2nd_STATISTICS
    request[Flare.STATS_TARGET_STATISTICS] = fobs.dumps(targets)
    request.update(inputs)
    return fobs.loads(fobs.dumps(request))


def change(kind: str = "describe", **terms: Any) -> Shareable:
    """Return the question with other terms."""

    class Changed(StatisticsExecutor):
        def collect_terms(self) -> dict[str, Any]:
            return super().collect_terms() | terms

    Changed.kind = kind
    return wrap(QUESTION, build_question(Changed(10)))


@pytest.mark.parametrize(
    "task",
    [
        ask_flare(
            [StatisticConfig(Flare.STATS_VAR, {})],
            **{Flare.STATS_GLOBAL_MEAN: {"site": {"age": [1.0] + [0.0] * 119}}, Flare.STATS_GLOBAL_COUNT: {"site": {}}},
        ),
        ask_flare([StatisticConfig(Flare.STATS_QUANTILE, {"*": [1, 2, 3]})]),
        ask_flare([StatisticConfig(Flare.STATS_HISTOGRAM, {"*": {Flare.STATS_BINS: 2}})]),
        change(least=1),
        change(quantiles=[1, 2, 3]),
        change(bins=1000),
        change(kind="fingerprint"),
        change(columns=["age"]),
        change(global_mean=0.0),
        wrap(QUESTION, "describe"),
        wrap(QUESTION, json.loads("[1]")),
        Shareable(),
    ],
)
def test_server_that_deviates_from_the_site_s_copy_of_the_job_is_refused(
    task: Shareable, tmp_path: Path, job: JobConfig
) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120))
    result = site.answer(QUESTION, task)
    assert (get_refusal_code(result), "DXO" in result) == ("E_REQUEST", False)
    assert "this site's copy of the job asks" in site.read_error()
    assert not (site.folder / REQUESTS_FOLDER).exists()


def test_questions_are_counted_over_jobs_and_restarts(tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120), {"max_lifetime_questions": 1, "max_starts": 2})
    answers = [get_refusal_code(site.answer(QUESTION, ask(site))) for _ in range(8)]
    # Three attempts of one start, twice: the same question costs nothing of the lifetime.
    assert [code == "OK" for code in answers] == [True] * 6 + [False] * 2
    assert "max_starts 2" in site.read_error()
    # Another executor is another process, and another number another question.
    site.executor = StatisticsExecutor(11)
    assert get_refusal_code(site.answer(QUESTION, ask(site))) == "E_REQUEST"
    assert "max_lifetime_questions 1" in site.read_error()
    first, second = sorted(
        (read_record(file) for file in (site.folder / REQUESTS_FOLDER / "A").glob("study-*.json")),
        key=lambda record: -len(record.questions),
    )
    assert [name.partition("/")[0] for name in first.questions] == ["describe"]
    assert [(entry.kind, entry.start, entry.answers) for entry in first.requests] == [
        ("describe", 1, 3),
        ("describe", 2, 3),
    ]
    assert (second.questions, len(second.requests)) == ({}, 1)


def test_statistics_that_answer_no_question_do_not_leave(tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120), {"foreign_jobs": True})
    good = site.answer(QUESTION, ask(site))
    # An executor of another package in a job with our settings; the answer before must not count for it.
    site.executor = SimpleNamespace(execute=lambda *_: good)
    site.fl_ctx.set_prop(ADMITTED, None, private=True, sticky=False)
    assert get_refusal_code(site.answer(QUESTION, ask_flare([]))) == "E_POLICY"
    assert "answer no question" in site.read_error()


GOOD = {"count": 30, "mean": 5.0, "stddev": 1.0, "quantile": {"50": 5.0}, "histogram": [[0.0, 5.0, 15], [5.0, 9.0, 15]]}


@pytest.mark.parametrize(
    "answer",
    [
        {"age": GOOD | {"count": -5}},
        {"age": GOOD | {"count": "<b>"}},
        {"age": GOOD | {"mean": "<b>"}},
        {"age": GOOD | {"mean": None}},
        {"age": GOOD | {"stddev": -1.0}},
        {"age": GOOD | {"quantile": {"<b>": 1.0}}},
        {"age": GOOD | {"quantile": [1, 2]}},
        {"age": GOOD | {"histogram": "<b>"}},
        {"age": GOOD | {"histogram": [[i, i + 1, 9] for i in range(20_000)]}},
        {"age": GOOD | {"histogram": [["<b>", 1, 2]]}},
        {"age": GOOD | {"<b>": 1}},
        {"age": {name: value for name, value in GOOD.items() if name != "count"}},
        {"a" * 10_000: GOOD},
        {"a\nb": GOOD},
        {"": GOOD},
        ["age"],
    ],
)
def test_server_takes_no_malformed_description(answer: Any) -> None:
    controller = DescriptionController("", 60)
    text = json.dumps(answer).encode()
    with pytest.raises(ValidationError):
        controller.parse(text)
    for changed in (text[:-1], text.replace(b"5.0", b"NaN"), b"[" * 100_000):
        with pytest.raises(ValidationError):
            controller.parse(changed)


def test_names_and_labels_of_a_site_are_text_on_the_page(tmp_path: Path) -> None:
    image = "<img src=x onerror=alert(1)>"
    controller = DescriptionController("", 60)
    found = controller.parse(json.dumps({image: GOOD, "a$b^{$": GOOD, f"sex={image}": GOOD}).encode())
    record = build_record("study", 10, controller.join({"A": found, "B": found}))
    page, _ = write_description(record, tmp_path)
    assert image not in page.read_text()


def test_such_a_job_carries_no_code_and_sites_run_no_class_of_flare(tmp_path: Path, job: JobConfig) -> None:
    QuestionRecipe(job, StatisticsExecutor(10), DescriptionController).export(str(tmp_path / "jobs"))
    assert not list((tmp_path / "jobs").glob("**/*.py"))
    (file,) = (tmp_path / "jobs").glob("**/config_fed_client.json")
    (server,) = (tmp_path / "jobs").glob("**/config_fed_server.json")
    assert [part["path"] for part in json.loads(server.read_text())["workflows"]] == [
        "flare_sparse.flare.questions.DescriptionController"
    ]
    content = json.loads(file.read_text())
    assert [part["executor"]["path"] for part in content["executors"]] == [
        "flare_sparse.flare.questions.StatisticsExecutor"
    ]
    assert content["executors"][0]["executor"]["path"] in CLASSES
    assert not content["components"]
    assert not content["task_result_filters"]


CELLS = {"release": "cells", "max_lifetime_questions": 40}


def test_description_leaves_once_and_no_single_person_shows_in_it(tmp_path: Path, job: JobConfig) -> None:
    rows = make_rows("A", 120)
    site = make_site(tmp_path / "A", job, rows, CELLS)
    question = wrap(QUESTION, build_question(site.executor))
    first = site.answer(QUESTION, question)
    found = Description.model_validate_json(from_shareable(first).data[ANSWER]).root
    assert all(own.count % 5 == 0 for own in found.values())
    # The deviation of heights is about 8, and 10 of 120 move a mean by up to 0.7 on its scale.
    assert all(value % 1 == 0 for value in (found["height"].mean, found["height"].stddev))
    assert not found["sex=F"].histogram
    # One person leaves: the same bytes.
    text = (site.folder / "table.csv").read_text().splitlines(keepends=True)
    (site.folder / "table.csv").write_text("".join([text[0], *text[2:]]))
    assert fobs.dumps(dict(site.answer(QUESTION, question))) == fobs.dumps(dict(first))


def test_fingerprint_needs_the_approval_of_a_person(tmp_path: Path, job: JobConfig) -> None:
    site = make_site(tmp_path / "A", job, make_rows("A", 120), CELLS)
    site.executor = FingerprintExecutor(5)
    question = wrap(QUESTION, build_question(site.executor))
    assert get_refusal_code(site.answer(QUESTION, question)) == "E_POLICY"
    assert "approved_rows: [fingerprint]" in site.read_error()
