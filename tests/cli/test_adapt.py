"""``flare-sparse evaluate --model adapted``: from the result folder of a run to the personal model of a new site."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from grey_images import write_images
from typer.testing import CliRunner, Result

from flare_sparse.api.local import run as run_in_process
from flare_sparse.cli import app
from flare_sparse.config.loading import load_config
from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError
from flare_sparse.core.params import Layout, TensorSpec
from flare_sparse.results.runs.folder import RunFolder
from flare_sparse.results.runs.load import load_study
from flare_sparse.results.runs.model_files import read_mask, read_model, save_model


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a finished MetaGater run with gates over two sites."""
    folder = tmp_path_factory.mktemp("adapt")
    for i in (1, 2, 9):
        write_images(folder / f"site-{i}.npz", i)
    model = {"name": "image_cnn", "channels": [4, 6], "gates": {"layers": ["1"], "hidden": 4}}
    training = {"optimizer": "sgd", "lr": 0.5, "batch_size": 32}
    config = {
        "name": "gated",
        "method": {"name": "metagater", "rounds": 6, "lasso": 0.02, "training": training},
        "task": {"name": "image_classification", "image": [1, 8, 8], "model": model},
        "simulator": {"sites": 2, "data": {"path": str(folder / "{site}.npz")}},
    }
    file = folder / "gated.yaml"
    file.write_text(yaml.safe_dump(config))
    run_in_process(Study.load(file), RunFolder(folder / "run"))
    return folder


@pytest.fixture
def call() -> Callable[..., Result]:
    return lambda *arguments: CliRunner().invoke(
        app, ["evaluate", "--model", "adapted", *map(str, arguments)], env={"COLUMNS": "200"}
    )


def test_adapt_writes_a_changed_model_and_metrics_before_and_after(finished: Path, call: Callable[..., Result]) -> None:
    result, folder = call(finished / "run", "--data", finished / "site-9.npz"), finished / "run/adapted/site-9"
    assert result.exit_code == 0, result.output
    figures = json.loads((folder / "adaptation.json").read_text())
    assert figures["training_examples"] == 19
    assert figures["before"]["test_examples"] == figures["after"]["test_examples"] == 5
    assert {"accuracy", "channel_sparsity"} <= figures["before"].keys() & figures["after"].keys()
    assert 0 <= figures["sparsity"] < 1
    assert figures["adaptation_seconds"] > 0
    layout = load_study(finished / "run").assembly.layout
    files = (path / "model.safetensors" for path in (finished / "run", folder))
    before, after = (layout.unflatten(read_model(file, layout)) for file in files)
    changed = {name for name in before if not before[name].equal(after[name])}
    assert any(".gate." in name for name in changed)
    assert any(".gate." not in name for name in changed)
    assert "accuracy" in result.output
    assert str(folder / "adaptation.json") in result.output


def test_adapting_twice_gives_the_same_bits(finished: Path, call: Callable[..., Result]) -> None:
    sums = []
    for _ in range(2):
        call(finished / "run", "--data", finished / "site-9.npz")
        sums.append(json.loads((finished / "run/adapted/site-9/adaptation.json").read_text())["sha256_after"])
    assert sums[0] == sums[1]


def test_adapt_reports_for_a_site_of_the_run_what_the_run_reported(finished: Path, call: Callable[..., Result]) -> None:
    """The command and the end of a run adapt a model in the same way."""
    call(finished / "run", "--data", finished / "site-1.npz")
    figures = json.loads((finished / "run/adapted/site-1/adaptation.json").read_text())
    summary = json.loads((finished / "run" / "summary.json").read_text())["final"]["sites"]["site-1"]
    assert {name: summary[name] for name in figures["after"]} == figures["after"]
    assert summary["accuracy_before"] == figures["before"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("run", "--data", "nowhere.npz"), "there is no file or folder of this name", 1),
        ((".", "--data", "site-9.npz"), "expected the result folder", 2),
        (("fedavg", "--data", "site-9.npz"), "'fedavg' does not adapt", 2),
        (("mlp", "--data", "site-9.npz"), "another network", 2),
        (("run",), "name the data of the new site with --data", 2),
        (("run", "--data", "site-9.npz", "--split", "test"), "leave --split and --name out", 2),
    ],
)
def test_run_that_cannot_be_adapted_is_refused_with_the_reason(
    finished: Path, call: Callable[..., Result], arguments: tuple[str, ...], message: str, code: int
) -> None:
    for name, change in (
        ("fedavg", {"method": {"name": "fedavg"}}),
        ("mlp", {"task": {"model": {"name": "image_mlp"}}}),
    ):
        shutil.copytree(finished / "run", finished / name, dirs_exist_ok=True)
        content = yaml.safe_load((finished / "run" / "config.yaml").read_text())
        content["method"] = change.get("method", content["method"])
        content["task"] |= change.get("task", {})
        (finished / name / "config.yaml").write_text(yaml.safe_dump(content))
    paths = [str(finished / a) if a in (".", "run", "fedavg", "mlp") or a.endswith(".npz") else a for a in arguments]
    result = call(*paths)
    assert result.exit_code == code
    assert message in result.output
    assert "Traceback" not in result.output


def test_damaged_model_is_refused(finished: Path, call: Callable[..., Result], tmp_path: Path) -> None:
    broken = tmp_path / "run"
    shutil.copytree(finished / "run", broken)
    (broken / "model.safetensors").write_bytes(b"no model")
    result = call(broken, "--data", finished / "site-9.npz")
    assert result.exit_code == 2
    assert "cannot be read as a model" in result.output


def test_model_and_mask_files_are_read_back_and_distinguished(finished: Path, tmp_path: Path) -> None:
    from flare_sparse.config.assemble import assemble

    assembly = assemble(load_config(finished / "run" / "config.yaml"))
    vector = read_model(finished / "run" / "model.safetensors", assembly.layout)
    assert vector.shape == (assembly.layout.size,)
    assert read_mask(finished / "run" / "model.safetensors", assembly.layout).size == assembly.layout.size
    save_model(tmp_path / "m", Layout((TensorSpec("a", (2,)),)), vector[:2])
    with pytest.raises(ConfigError, match="another network"):
        read_model(tmp_path / "m", Layout((TensorSpec("b", (2,)),)))
