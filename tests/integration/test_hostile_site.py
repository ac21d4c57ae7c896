"""One of three sites of a real FLARE job is hostile: the job ends with the bits of a job without that site."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from flare_sparse.config.assemble import assemble, open_site
from flare_sparse.config.loading import load_config
from flare_sparse.config.schema import RunConfig, build_task
from flare_sparse.core.params import compute_digest
from flare_sparse.flare.launch.simulator import Workplace, simulate
from flare_sparse.flare.payload import TASK
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.rounds.local.run import Course, run_locally
from flare_sparse.tasks.data.source import write_site_files
from flare_sparse.tasks.task import SiteData

HERE = Path(__file__).parent
SITES, OTHERS, HOSTILE = ["site-1", "site-2", "site-3"], ["site-1", "site-3"], "site-2"


@pytest.fixture
def attacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the hostile filter, imported as in the processes of the job."""
    (tmp_path / "hostile_site.py").write_text((HERE / "hostile_site.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("hostile_site")


def configuration(folder: Path, rounds: int) -> RunConfig:
    """FedAvg over SumTask; without quarantine, so that every attack is sent."""
    (folder / "own_task.py").write_text((HERE / "own_task.py").read_text())
    content = {
        "name": "hostile",
        "seed": 3,
        "method": {"name": "fedavg", "rounds": rounds, "training": {"epochs": 1, "lr": 0.01}},
        "task": {"class": "own_task.SumTask", "width": 8},
        "federation": {"task_timeout_s": 60, "quarantine_after": 0},
        "deployment": {"packaging": "byoc"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return load_config(folder / "config.yaml")


def create_sites(folder: Path) -> dict[str, SiteData]:
    for site in SITES:
        (folder / site).mkdir()
    return {site: SiteData(site, folder / site) for site in SITES}


def run_without_the_hostile_site(config: RunConfig, data: dict[str, SiteData], folder: Path) -> str:
    """Return the digest of the model of a run without the hostile site."""
    assembly = assemble(config, build_task(config))
    sites = {name: open_site(assembly, data[name]) for name in OTHERS}
    metric = assembly.task.metric
    outcome, _ = run_locally(
        assembly.method, assembly.weights, sites, metric, course=Course(run=assembly.run_id, rules=config.federation)
    )
    return compute_digest(outcome.weights)


@pytest.mark.long
def test_hostile_site_is_rejected_in_every_round_and_leaves_no_trace(tmp_path: Path, attacks: ModuleType) -> None:
    config, data = configuration(tmp_path, len(attacks.ATTACKS)), create_sites(tmp_path)
    recipe = SparseRecipe(config, modules=(tmp_path / "own_task.py", tmp_path / "hostile_site.py"))
    recipe.add_client_output_filter(attacks.Hostile(HOSTILE), tasks=[TASK])
    out = tmp_path / "out"
    summary = simulate(recipe, Workplace(SITES, write_site_files(tmp_path / "files", data.values())), out)
    record = (out / "rounds.jsonl").read_text()
    *training, last = [json.loads(line) for line in record.splitlines()]
    assert [line["rejected"] for line in training] == [{HOSTILE: code} for code, _ in attacks.ATTACKS]
    assert all(line["sites_contributed"] == OTHERS for line in training)
    assert last["sites_contributed"] == SITES
    assert "CANARY-4711" not in record, "text of a site must not enter the record"
    assert summary["model_sha256"] == run_without_the_hostile_site(config, data, tmp_path)
