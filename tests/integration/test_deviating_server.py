"""A changed controller in FLARE's simulator: the sites answer the question of their own copy of the job alone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from nnunet_data import require_nnunet, write_raw

from flare_sparse.api.describe import run_statistics_job
from flare_sparse.config.study import Study
from flare_sparse.core.observer import SILENT
from flare_sparse.flare import questions
from flare_sparse.flare.recipe import QuestionRecipe
from flare_sparse.rounds.endpoints.egress import find_logs, read_chain
from flare_sparse.rounds.endpoints.request_log import read_record

pytestmark = pytest.mark.long


def write_study(folder: Path, **sections: Any) -> Study:
    settings = {"name": "study", "seed": 1, "method": {"name": "fedavg", "rounds": 1}, "federation": {"min_sites": 2}}
    (folder / "study.yaml").write_text(yaml.safe_dump({**settings, **sections}))
    return Study.load(folder / "study.yaml")


def deviate(study: Study, recipe: QuestionRecipe, result: str, out: Path, sites: list[str], *terms: str) -> Any:
    """Return what a deviating server gets by its honest question; each other one was refused, which is logged."""
    content = run_statistics_job(study, recipe, result, out, None, SILENT)
    (codes,) = out.rglob("codes.json")
    refused = dict.fromkeys(sites, "E_REQUEST")
    assert json.loads(codes.read_text()) == dict.fromkeys(("flare", "kind", "no terms", *terms), refused)
    records = [read_record(file) for file in out.rglob("flare_sparse_requests/*/study-*.json")]
    assert [(len(record.requests), len(record.questions)) for record in records] == [(1, 1)] * 2
    logs = [read_chain(folder)[0] for folder in find_logs(out).values()]
    assert [[line["contents"] for line in lines].count(["E_REQUEST"]) for lines in logs] == [3 + len(terms)] * 2
    return content


@pytest.fixture(autouse=True)
def _changed(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in the processes of the job.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    changed = importlib.import_module("deviating_server")
    monkeypatch.setattr(questions, "DescriptionController", changed.DeviatingDescription)
    monkeypatch.setattr(questions, "FingerprintController", changed.DeviatingFingerprint)


def test_sites_describe_only_what_their_copy_of_the_job_asks(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=120).round(3)
    rows = "".join(f"s{i},h{i % 2},{value},{i // 2 % 2}\n" for i, value in enumerate(values))
    (tmp_path / "t.csv").write_text(f"id,site,a,y\n{rows}")
    study = write_study(
        tmp_path,
        task={"name": "table", "kind": "binary", "target": "y", "features": ["a"], "id": "id"},
        simulator={"data": {"path": "t.csv", "partition": {"kind": "natural", "column": "site"}}},
    )
    recipe = QuestionRecipe(study.config.job, questions.StatisticsExecutor(10), questions.DescriptionController)
    result = questions.DescriptionController.result
    columns = deviate(study, recipe, result, tmp_path / "out", ["h0", "h1"], "least", "quantiles", "bins")
    assert [site["count"] for site in columns["a"].values()] == [60, 60]


def test_sites_collect_only_the_fingerprint_that_their_copy_of_the_job_asks(tmp_path: Path) -> None:
    require_nnunet()
    names = ["site-1", "site-2"]
    for number, name in enumerate(names):
        write_raw(tmp_path / name, 3, number)
    study = write_study(
        tmp_path, task={"name": "nnunet"}, simulator={"sites": 2, "data": {"path": str(tmp_path / "{site}")}}
    )
    recipe = QuestionRecipe(study.config.job, questions.FingerprintExecutor(500), questions.FingerprintController)
    result = questions.FingerprintController.result
    content = deviate(study, recipe, result, tmp_path / "out", names, "samples_per_case")
    assert content["sites"] == names
