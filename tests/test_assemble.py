"""What a site may set for itself, and that the record of a run begins with what is known before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from flare_sparse.assemble import assemble, open_site
from flare_sparse.cli.sites import simulated_sites
from flare_sparse.config import RunConfig, load_config
from flare_sparse.data.source import site_data, write_site_files
from flare_sparse.errors import ConfigError
from flare_sparse.mask import Mask
from flare_sparse.params import Layout
from flare_sparse.runs.folder import build_run_facts
from flare_sparse.runs.model_files import load_mask, save_mask
from flare_sparse.task import SiteData

STAYS = "stay,died,med_a,med_b\n" + "".join(f"{i},{i % 2},{i % 2},{i % 3 % 2}\n" for i in range(20))


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "stays.csv").write_text(STAYS)
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: job\nmethod: {name: scbf, rounds: 1}\n"
        "task: {name: mortality, medications: 2, model: {name: mlp, hidden: [3]}}\n"
        "simulator: {sites: 2, data: {path: stays.csv, partition: {kind: iid}},"
        " site_settings: {site-2: {scbf: {budget: 0.5}}}}\n"
    )
    return load_config(file)


def test_a_sites_choice_reaches_its_site_through_its_site_file(config: RunConfig, tmp_path: Path) -> None:
    assembly = assemble(config)
    data = simulated_sites(config, assembly.task, tmp_path)
    variable = write_site_files(tmp_path / "sites", data.values())
    found = {name: open_site(assembly, site_data(name, None, {"FLARE_SPARSE_SITE_FILE": variable})) for name in data}
    assert found["site-1"].site_settings is None
    assert found["site-2"].site_settings.budget == 0.5
    assert found["site-2"].site_settings.rate is None


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"scbf": {"rate": 2}}, r"methods\.scbf\.rate: Input should be less than or equal to 1"),
        ({"scbf": {"aggregation": "mean"}}, r"methods\.scbf\.aggregation: Extra inputs .*A site may set: rate, budget"),
    ],
)
def test_a_choice_that_is_not_the_sites_is_refused(
    choice: dict[str, dict[str, object]], message: str, config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_site(assemble(config), SiteData("a", tmp_path / "stays.csv", None, choice))


def test_a_choice_for_a_method_that_leaves_none_is_refused_and_one_for_another_method_is_not_looked_at(
    config: RunConfig, tmp_path: Path
) -> None:
    averaging = load_config(tmp_path / "job.yaml", ["method={name: fedavg, rounds: 1}"])
    with pytest.raises(ConfigError, match="this method leaves no setting to a site"):
        open_site(assemble(averaging), SiteData("a", tmp_path / "stays.csv", None, {"fedavg": {"rate": 1}}))
    site = open_site(assemble(averaging), SiteData("a", tmp_path / "stays.csv", None, {"scbf": {"rate": 0.1}}))
    assert site.site_settings is None


def test_choices_of_an_unknown_site_are_named(config: RunConfig, tmp_path: Path) -> None:
    other = load_config(tmp_path / "job.yaml", ["simulator.site_settings={site-3: {scbf: {rate: 0.1}}}"])
    with pytest.raises(ConfigError, match=r"simulator\.site_settings: no site 'site-3'.*site-1, site-2"):
        simulated_sites(other, assemble(other).task, tmp_path)


def test_the_record_begins_with_what_the_method_found(config: RunConfig) -> None:
    facts = build_run_facts(config, assemble(config))
    assert (facts.name, facts.method, facts.rounds) == ("job", "scbf", 1)
    assert "3 channels through 2 layers, threshold exact" in facts.note


def test_a_saved_mask_is_read_back_and_another_networks_is_refused(tmp_path: Path) -> None:
    layout = Layout.from_module(nn.Linear(3, 2))
    mask = Mask.from_tensors(layout, lambda entry: entry.role == "weight")
    save_mask(tmp_path / "mask.safetensors", layout, mask)
    assert load_mask(tmp_path / "mask.safetensors", layout) == mask
    with pytest.raises(ConfigError, match="holds another network"):
        load_mask(tmp_path / "mask.safetensors", Layout.from_module(nn.Linear(4, 2)))
    with pytest.raises(ConfigError, match="cannot be read as a model or mask"):
        load_mask(tmp_path / "none.safetensors", layout)
