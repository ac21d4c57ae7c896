"""Every file in app_configs/ is valid, named after itself and described by comments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flare_sparse.config.loading import dump_config, load_config
from flare_sparse.config.schema import build_task
from flare_sparse.core.params import Layout
from flare_sparse.methods.registry import METHODS

FOLDER = Path(__file__).parents[1] / "app_configs"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_configuration_is_valid_named_after_its_file_and_described(file: Path, tmp_path: Path) -> None:
    config = load_config(file)
    assert config.name == file.stem
    assert file.read_text().startswith("# ")
    copy = tmp_path / "resolved.yaml"
    copy.write_text(dump_config(config))
    assert load_config(copy) == config


def test_every_method_has_a_configuration() -> None:
    assert {load_config(file).method.name for file in FILES} == set(METHODS)


def test_files_named_in_comments_exist() -> None:
    named = {name for file in FILES for name in re.findall(r"app_configs/(\w+\.yaml)", file.read_text())}
    assert named <= {file.name for file in FILES}


def test_fedsparsify_preset_has_the_papers_settings() -> None:
    config = load_config(FOLDER / "fedsparsify_paper.yaml")
    settings = config.method.config.model_dump()
    assert config.simulator is not None
    assert (config.simulator.sites, settings["rounds"], settings["exponent"], settings["prune_every"]) == (8, 40, 3, 1)
    assert (
        settings["training"] | {"epochs": 4, "batch_size": 1, "optimizer": "sgd", "lr": 1e-5, "momentum": 0.0}
        == (settings["training"])
    )
    assert Layout.from_module(build_task(config).model()).size == 2_950_401


def test_neurosfl_preset_has_the_papers_network() -> None:
    layout = Layout.from_module(build_task(load_config(FOLDER / "neurosfl_alexnet3d.yaml")).model())
    assert layout.num_parameters == 2_570_241
    assert sum(entry.size for entry in layout.tensors if entry.role == "weight") == 2_568_064
