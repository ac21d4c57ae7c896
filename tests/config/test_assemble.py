"""Settings that a site chooses for itself, and the parts of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from flare_sparse.config.assemble import assemble, count_model_entries, open_site
from flare_sparse.config.loading import load_config, parse_job
from flare_sparse.config.schema import RunConfig, build_task
from flare_sparse.config.study import prepare_site_data
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.mask import Mask
from flare_sparse.core.params import Layout
from flare_sparse.results.runs.model_files import read_mask, save_model
from flare_sparse.tasks.data.source import find_site_data, write_site_files
from flare_sparse.tasks.task import SiteData

CONFIGS = Path(__file__).parents[2] / "app_configs"
STAYS = "stay,died,med_a,med_b\n" + "".join(f"{i},{i % 2},{i % 2},{i % 3 % 2}\n" for i in range(20))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "stays.csv").write_text(STAYS)
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: job\nmethod: {name: scbf, rounds: 1}\n"
        "task: {name: table, kind: binary, target: died, id: stay, "
        "features: [med_a, med_b], scaling: none, model: {name: mlp, hidden: [3]}}\n"
        "simulator: {sites: 2, data: {path: stays.csv, partition: {kind: iid}},"
        " site_settings: {site-2: {scbf: {budget: 0.5}}}}\n"
    )
    return load_config(file)


def test_site_settings_reach_the_site_through_its_site_file(config: RunConfig, tmp_path: Path) -> None:
    assembly = assemble(config)
    data = prepare_site_data(config, assembly.task, tmp_path)
    variable = write_site_files(tmp_path / "sites", data.values())
    sites = {
        name: open_site(assembly, find_site_data(name, None, {"FLARE_SPARSE_SITE_FILE": variable})) for name in data
    }
    assert sites["site-1"].site_settings is None
    assert sites["site-2"].site_settings.budget == 0.5
    assert sites["site-2"].site_settings.rate is None


def test_warning_of_the_task_about_a_sites_examples_is_found(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembly = assemble(config)
    data = prepare_site_data(config, assembly.task, tmp_path)["site-1"]
    load = assembly.task.load
    monkeypatch.setattr(assembly.task, "load", lambda *of: replace(load(*of), warnings=("doses are in mg",)))
    found = list(open_site(assembly, data).trainer.examples.find_warnings("site-1"))
    assert ("WARN", "data of site-1", "doses are in mg") in [(one.severity, one.place, one.text) for one in found]


@pytest.mark.parametrize(
    ("site_settings", "message"),
    [
        ({"scbf": {"rate": 2}}, r"methods\.scbf\.rate: Input should be less than or equal to 1"),
        ({"scbf": {"aggregation": "mean"}}, r"methods\.scbf\.aggregation: Extra inputs .*A site may set: rate, budget"),
    ],
)
def test_invalid_site_settings_raise(
    site_settings: dict[str, dict[str, object]], message: str, config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_site(assemble(config), SiteData("a", tmp_path / "stays.csv", None, site_settings))


def test_settings_for_a_method_without_site_settings_raise_and_for_another_method_are_ignored(
    config: RunConfig, tmp_path: Path
) -> None:
    averaging = load_config(tmp_path / "job.yaml", ["method={name: fedavg, rounds: 1}"])
    with pytest.raises(ConfigError, match="this method has no settings that a site may choose"):
        open_site(assemble(averaging), SiteData("a", tmp_path / "stays.csv", None, {"fedavg": {"rate": 1}}))
    site = open_site(assemble(averaging), SiteData("a", tmp_path / "stays.csv", None, {"scbf": {"rate": 0.1}}))
    assert site.site_settings is None


def test_settings_of_an_unknown_site_raise(config: RunConfig, tmp_path: Path) -> None:
    other = load_config(tmp_path / "job.yaml", ["simulator.site_settings={site-3: {scbf: {rate: 0.1}}}"])
    with pytest.raises(ConfigError, match=r"simulator\.site_settings: there is no site 'site-3'.*site-1, site-2"):
        prepare_site_data(other, assemble(other).task, tmp_path)


def test_method_notes_what_its_settings_mean_for_the_network(config: RunConfig) -> None:
    assert "3 channels through 2 layers, threshold exact" in assemble(config).method.describe()


def test_saved_mask_trips_and_another_network_raises(tmp_path: Path) -> None:
    layout = Layout.from_module(nn.Linear(3, 2))
    mask = Mask.from_tensors(layout, lambda spec: spec.role == "weight")
    save_model(tmp_path / "mask.safetensors", layout, torch.ones(layout.size), mask)
    assert read_mask(tmp_path / "mask.safetensors", layout) == mask
    with pytest.raises(ConfigError, match="belongs to another network"):
        read_mask(tmp_path / "mask.safetensors", Layout.from_module(nn.Linear(4, 2)))
    with pytest.raises(ConfigError, match="cannot be read as a model"):
        read_mask(tmp_path / "none.safetensors", layout)


def test_number_of_threads_and_size_of_the_model_are_bounded_before_allocation() -> None:
    columns = ["x_{0..999999}"]
    task = {"name": "table", "kind": "regression", "target": "y", "features": columns, "scaling": "none"}
    settings = {"name": "job", "method": {"name": "fedavg"}, "task": task}
    with pytest.raises(ConfigError, match=r"federation\.threads"):
        parse_job({**settings, "federation": {"threads": 1025}})
    job = parse_job({**settings, "task": {**settings["task"], "model": {"name": "mlp", "hidden": [100_000]}}})
    assert count_model_entries(build_task(job)) == 100_000 * 1_000_002 + 1  # 400 GB if allocated
    with pytest.raises(ConfigError, match="allows max_model_entries 1000000"):
        assemble(job, max_entries=10**6)


@pytest.mark.parametrize(
    ("override", "setting"),
    [
        ("privacy={epsilon: 3}", "privacy"),
        ("wire.aggregation=masked", "wire.aggregation: masked"),
        ("wire.values=bfloat16", "wire.values: float16, bfloat16, bfloat16_zstd"),
    ],
)
def test_job_that_protects_values_refuses_a_network_with_statistics_of_all_sites(override: str, setting: str) -> None:
    config = load_config(CONFIGS / "fedavg_voxels.yaml", ["federation.min_sites=3", override])
    with pytest.raises(ConfigError, match=f"^{setting}: .*, but the network: .*task.model"):
        assemble(config)


def test_mean_and_spread_of_a_sites_targets_stay_there_from_the_start(tmp_path: Path) -> None:
    (tmp_path / "ages.csv").write_text("x,age\n" + "".join(f"{i % 7},{20 + i}\n" for i in range(20)))
    settings = {
        "name": "job",
        "method": {"name": "fedavg", "rounds": 1, "personal": "site"},
        "task": {"name": "table", "kind": "regression", "target": "age", "features": ["x"], "target_scaling": "site"},
    }
    assembly = assemble(parse_job(settings))
    assert "target.statistics" not in {spec.name for spec in assembly.layout.tensors}
    site = open_site(assembly, SiteData("a", tmp_path / "ages.csv"))
    site.evaluate(assembly.weights)
    layout, vector = site.evaluated or pytest.fail("nothing was evaluated")
    ages = torch.stack([age for _, age in site.trainer.examples.train])
    expected = [ages.mean().item(), ages.std(correction=0).item()]
    assert layout.unflatten(vector)["target.statistics"].tolist() == pytest.approx(expected)
    # Elsewhere, and at the server, they are unknown.
    assert assembly.personal["target.statistics"].tolist() == [0, 1]
    # Nothing but these stays, so there is nothing to train, and no later round changes them.
    site.train(assembly.weights, Mask.full(assembly.layout.size), assembly.method.config.training, 1)
    assert site.memory["personal"].tolist() == pytest.approx(expected)
    shared = {**settings, "method": {"name": "fedavg"}}
    with pytest.raises(ConfigError, match=r"describes the data of one site .*; set method\.personal: site"):
        assemble(parse_job(shared))
