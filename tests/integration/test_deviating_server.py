"""A changed controller in FLARE's simulator: the sites answer the question of their own copy of the job alone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from flare_sparse.api.describe import run_statistics_job
from flare_sparse.config.study import Study
from flare_sparse.core.observer import SILENT
from flare_sparse.flare import statistics
from flare_sparse.rounds.endpoints.request_log import read_record

pytestmark = pytest.mark.long


def test_sites_refuse_and_count_what_a_changed_controller_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).normal(size=180).round(3)
    rows = "".join(f"s{i},h{i % 3},{value},{i % 2}\n" for i, value in enumerate(values))
    (tmp_path / "t.csv").write_text(f"id,site,a,y\n{rows}")
    task = {"name": "table", "kind": "binary", "target": "y", "features": ["a"], "id": "id"}
    partition = {"kind": "natural", "column": "site"}
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump({
            "name": "study", "seed": 1, "method": {"name": "fedavg", "rounds": 1}, "task": task,
            "federation": {"min_sites": 3}, "simulator": {"data": {"path": "t.csv", "partition": partition}},
        })
    )  # fmt: skip
    # As in the processes of the job.
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    controller = importlib.import_module("deviating_server").DeviatingController
    monkeypatch.setattr(statistics, "DescriptionController", controller)
    study, out = Study.load(tmp_path / "study.yaml"), tmp_path / "out"
    recipe = statistics.DescriptionRecipe(study.config.job, 10)
    columns = run_statistics_job(study, recipe, statistics.RESULT, out, None, SILENT)
    assert [columns["a"][site]["count"] for site in ("h0", "h1", "h2")] == [60, 60, 60]
    (codes,) = out.rglob("codes.json")
    refused = dict.fromkeys(("h0", "h1", "h2"), "E_REQUEST")
    assert json.loads(codes.read_text()) == dict.fromkeys(("flare", "few", "other", "bins"), refused)
    records = [read_record(file) for file in out.rglob("flare_sparse_requests/*/study-*.json")]
    assert [[entry.kind for entry in record.requests] for record in records] == [["describe"]] * 3
    assert [len(record.questions) for record in records] == [1, 1, 1]
