"""A run whose sites keep a part of the network: its files, its evaluation, and a new site."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from grey_images import write_images
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from flare_sparse import load_model
from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.load import load_study
from flare_sparse.results.runs.results import RunResult


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a finished run of two sites that keep the head, and data of a third."""
    folder = tmp_path_factory.mktemp("personal")
    for i in (1, 2, 9):
        write_images(folder / f"site-{i}.npz", i)
    config = {
        "name": "heads",
        "method": {"name": "fedavg", "rounds": 3, "personal": "head", "training": {"lr": 0.01}},
        "task": {
            "name": "image_classification",
            "image": [1, 8, 8],
            "split": {"validation": 0.2},
            "model": {"name": "image_cnn", "channels": [4, 6]},
        },
        "simulator": {"sites": 2, "data": {"path": str(folder / "{site}.npz")}},
    }
    file = folder / "heads.yaml"
    file.write_text(yaml.safe_dump(config))
    run_in_process(Study.load(file), RunFolder(folder / "run"))
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_model_of_the_run_lacks_the_head_and_models_of_sites_have_their_own(folder: Path) -> None:
    common = load_file(folder / "run" / "model.safetensors")
    sites = [load_file(folder / "run" / "site_models" / f"site-{i}.safetensors") for i in (1, 2)]
    heads = set(sites[0]) - set(common)
    assert len(heads) == 2
    for site in sites:
        assert all(torch.equal(site[name], tensor) for name, tensor in common.items())
    assert not any(torch.equal(sites[0][name], sites[1][name]) for name in heads)
    loaded, initial = load_model(folder / "run").state_dict(), load_study(folder / "run").assembly.personal
    assert heads == set(initial)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in {**common, **initial}.items())
    assert RunResult.read(folder / "run").personal_model == "the run's model with the site's own tensors"


def test_every_model_of_the_run_can_be_evaluated_at_every_site(folder: Path) -> None:
    result = invoke("evaluate", folder / "run", "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    final = RunResult.read(folder / "run").site_metrics
    assert record["results"]["site-1"]["site-1"]["accuracy"] == final["site-1"]
    assert set(record["results"]["site-1"]) == {"final", "best", "site-1", "site-2"}


def test_new_site_adapts_its_head_and_saves_the_whole_network(folder: Path) -> None:
    result = invoke("evaluate", folder / "run", "--data", folder / "site-9.npz", "--model", "adapted")
    assert result.exit_code == 0, result.output
    adapted = load_file(folder / "run" / "adapted" / "site-9" / "model.safetensors")
    common = load_file(folder / "run" / "model.safetensors")
    assert all(torch.equal(adapted[name], tensor) for name, tensor in common.items())
    initial = load_study(folder / "run").assembly.personal
    assert not any(torch.equal(adapted[name], tensor) for name, tensor in initial.items())


def test_layer_that_the_network_lacks_is_refused_before_the_run(folder: Path, tmp_path: Path) -> None:
    config = load_config(folder / "heads.yaml", ["method.personal=norms"])
    with pytest.raises(ConfigError, match=r"method\.personal: 'norms' matches no tensor of the network, which has"):
        run_in_process(Study(config, folder / "heads.yaml"), RunFolder(tmp_path / "run"))


def test_check_finds_a_choice_that_matches_nothing(folder: Path) -> None:
    result = invoke("check", folder / "heads.yaml", "--set", "method.personal=[9.*]")
    assert result.exit_code != 0
    assert "'9.*' matches no tensor of the network" in " ".join(result.output.split())


def test_saved_model_is_that_of_a_site_or_says_what_it_lacks(folder: Path, tmp_path: Path) -> None:
    result = invoke("save", folder / "run", "--out", tmp_path / "common")
    assert result.exit_code == 0, result.output
    assert "stay at the sites and have their initial values" in result.output
    result = invoke("save", folder / "run", "--out", tmp_path / "own", "--model", "site-2")
    assert result.exit_code == 0, result.output
    assert "initial values" not in result.output
    own, expected = (
        load_file(tmp_path / "own" / "model.safetensors"),
        load_file(folder / "run" / "site_models" / "site-2.safetensors"),
    )
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
