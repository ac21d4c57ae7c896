"""One of three sites of a real FLARE job is hostile: the job ends, and with the bits of a job that it has no part in."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flare_sparse.assemble import assemble
from flare_sparse.config import build_task, load_config, user_task
from flare_sparse.data.source import write_site_files
from flare_sparse.flare.payload import TASK
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.flare.simulator import simulate
from flare_sparse.task import SiteData

HERE = Path(__file__).parent
SITES = ("site-1", "site-2", "site-3")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the hostile filter, importable as the job's processes import it."""
    file = tmp_path / "hostile_site.py"
    file.write_text((HERE / "hostile_site.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("hostile_site")


def configuration(folder: Path, rounds: int) -> Path:
    """FedAvg over SumTask."""
    (folder / "own_task.py").write_text((HERE / "own_task.py").read_text())
    content = {
        "name": "hostile",
        "seed": 3,
        "method": {"name": "fedavg", "rounds": rounds, "training": {"epochs": 1, "lr": 0.01}},
        "task": {"class": "own_task.SumTask", "width": 8},
        "federation": {"task_timeout_s": 60, "quarantine_after": 0},
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.slow
def test_a_hostile_site_is_refused_in_every_round_and_leaves_no_trace(tmp_path: Path, hostile: Any) -> None:
    file = configuration(tmp_path, len(hostile.ATTACKS))
    config = load_config(file)
    for site in SITES:
        (tmp_path / site).mkdir()
    recipe = SparseRecipe(config, packaging="byoc", modules=(tmp_path / "own_task.py", tmp_path / "hostile_site.py"))
    recipe.add_client_output_filter(hostile.Hostile("site-2"), tasks=[TASK])
    places = write_site_files(tmp_path / "files", [SiteData(site, tmp_path / site) for site in SITES])
    out = tmp_path / "out"
    summary = simulate(recipe, SITES, places, out)
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    *training, last = rounds
    assert [line["rejected"] for line in training] == [{"site-2": code} for code, _ in hostile.ATTACKS]
    assert all(line["sites_in"] == ["site-1", "site-3"] for line in training)
    assert last["sites_in"] == list(SITES)
    assert "CANARY-4711" not in (out / "rounds.jsonl").read_text()
    assert summary["model_sha256"] == without_it(file, tmp_path)


def without_it(file: Path, folder: Path) -> str:
    """The model's digest of a run of the other sites."""
    from flare_sparse.assemble import open_site, rules
    from flare_sparse.rehearsal import rehearse
    from flare_sparse.server import digest

    config = load_config(file)
    assembly = assemble(config, build_task(config, user_task(config.task.name, file.parent)))
    sites = {name: open_site(assembly, SiteData(name, folder / name)) for name in ("site-1", "site-3")}
    metric = assembly.task.metric
    outcome, _ = rehearse(assembly.method, assembly.weights, sites, metric, run=assembly.run, rules=rules(config))
    return digest(outcome.weights)
