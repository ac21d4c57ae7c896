"""The command line: help texts, refused options, output and exit codes."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import Field
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner, Result

from flare_sparse.cli import app
from flare_sparse.errors import DataError
from flare_sparse.methods import METHODS
from flare_sparse.task import Examples, Metric, SiteData, Task, TaskConfig
from flare_sparse.tasks import TASKS

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "run",
    "check",
    "estimate",
    "export",
    "methods",
    "phantom",
    "save",
    "fetch-model",
    "adapt",
    "site",
}


class LineConfig(TaskConfig):
    width: int = Field(2, ge=1, description="numbers in an example")
    broken: bool = Field(False, description="the model cannot be built")
    crash: bool = Field(False, description="the loss raises an error of its own")
    scale: float = Field(1.0, description="scale of the numbers in an example")


class LineTask(Task):
    """Predict the sum of a few numbers; the folder of each site must hold a file ``ok``."""

    Config = LineConfig
    metric = Metric("mae", "", "min")

    def model(self) -> nn.Module:
        assert isinstance(self.config, LineConfig)
        return nn.Linear(self.config.width, 1).to(torch.float64 if self.config.broken else torch.float32)

    def load(self, data: SiteData, seed: int) -> Examples:
        assert isinstance(self.config, LineConfig)
        if not (data.path / "ok").is_file():
            raise DataError(f"{data.path.name}: no file 'ok'; put one there")
        x = self.config.scale * torch.rand(10, self.config.width, generator=torch.Generator().manual_seed(seed))
        return Examples(TensorDataset(x[:8], x[:8].sum(1)), TensorDataset(x[8:], x[8:].sum(1)))

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(self.config, LineConfig)
        if self.config.crash:
            return batch[0].sum() * (1 // 0)
        return nn.functional.l1_loss(model(batch[0]).squeeze(1), batch[1])

    def predict(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch[0]).squeeze(1), batch[1]

    def metrics(self, predictions: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
        return {"mae": float((predictions - targets).abs().mean())}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of two sites with data."""
    monkeypatch.setitem(TASKS, "line", LineTask)
    for site in ("site-1", "site-2"):
        (tmp_path / site).mkdir()
        (tmp_path / site / "ok").touch()
    file = tmp_path / "line.yaml"
    file.write_text(
        "name: line\nmethod: {name: fedavg}\ntask: {name: line}\nsimulator: {sites: 2, data: {path: '{site}'}}\n"
    )
    return file


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def test_installed_command_is_this_app() -> None:
    (entry,) = [e for e in entry_points(group="console_scripts") if e.name == "flare-sparse"]
    assert entry.load() is app


def test_help_shows_a_first_command_and_lists_all_commands() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert "flare-sparse run app_configs/neurosfl_brain_age.yaml" in result.output
    assert {name for name in COMMANDS if f" {name} " in result.output} == COMMANDS
    assert (ROOT / "app_configs/neurosfl_brain_age.yaml").is_file()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_every_command_has_an_example(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0
    assert f"flare-sparse {name} " in result.output.replace("\n", " ")


def test_version_option_prints_the_installed_version() -> None:
    assert call("--version").output == f"flare-sparse {version('flare-sparse')}\n"


def test_methods_lists_every_method_with_its_source() -> None:
    lines = call("methods").output.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(METHODS)
    (neurosfl,) = [line for line in lines if line.startswith("neurosfl")]
    assert neurosfl.rstrip().endswith("NeuroSFL (Thapaliya et al. 2024), Algorithm 1")


def test_methods_shows_every_setting_with_default_and_range() -> None:
    lines = call("methods", "fedsparsify").output.splitlines()
    (sparsity,) = [line for line in lines if line.startswith("method.sparsity ")]
    assert "0.9" in sparsity
    assert "a number, >= 0, < 1" in sparsity
    assert any(line.startswith("method.training.lr ") for line in lines)


def test_methods_shows_a_methods_own_defaults_of_a_section() -> None:
    lines = call("methods", "lora_a2").output.splitlines()
    rows = {words[0]: words[1] for words in map(str.split, lines) if len(words) > 1}
    assert rows["method.training.optimizer"] == "adamw"
    assert rows["method.training.epochs"] == "5"


def test_unknown_method_exits_with_2_and_suggests_the_closest_name() -> None:
    result = call("methods", "neurosfll")
    assert result.exit_code == 2
    assert "Did you mean 'neurosfl'?" in result.output
    assert "Traceback" not in result.output


def test_check_passes_every_step_of_a_valid_configuration(config: Path) -> None:
    result = call("check", config)
    lines = result.output.splitlines()
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in lines] == ["PASS"] * 9, result.output
    note = "PASS federation: max_share is 1: a site that reports 2^52 examples determines the model alone"
    assert lines[1].startswith(note)
    assert lines[3] == "PASS model: 3 scalars"
    assert lines[5] == "PASS data of site-1: 8 training and 2 test examples"


def test_check_shows_the_largest_weight_of_a_site(config: Path) -> None:
    result = call("check", config, "--set", "federation.max_share=0.5")
    assert "PASS federation: one site has at most 50% of a round's weight" in result.output


def test_check_reports_every_site_with_bad_data_and_continues(config: Path) -> None:
    for site in ("site-1", "site-2"):
        (config.parent / site / "ok").unlink()
    result = call("check", config)
    assert result.exit_code == 1
    assert "PASS model" in result.output
    assert "site-1: no file 'ok'" in result.output
    assert "site-2: no file 'ok'" in result.output
    assert "Traceback" not in result.output


def test_check_trains_one_step_at_a_site_with_data(config: Path) -> None:
    (config.parent / "site-1/ok").unlink()
    result = call("check", config)
    assert result.exit_code == 1
    assert "PASS one training step" in result.output


def test_check_reports_a_model_that_cannot_be_built_and_still_reads_the_data(config: Path) -> None:
    result = call("check", config, "--set", "task.broken=true")
    assert "FAIL model: E_CONFIG" in result.output
    assert "PASS data of site-2" in result.output
    assert result.exit_code == 2


def test_check_reports_all_errors_of_a_configuration(config: Path) -> None:
    result = call("check", config, "--set", "task.widht=3", "--set", "method.rounds=0")
    assert result.exit_code == 2
    assert "Did you mean 'width'?" in result.output
    assert "method.rounds: found 0; expected a whole number, >= 1" in result.output


def test_check_reports_a_diverging_step(config: Path) -> None:
    result = call("check", config, "--set", "method.training={optimizer: sgd, lr: 3e38}", "--set", "task.scale=1e20")
    assert "FAIL one training step: E_DIVERGED" in result.output
    assert result.exit_code == 1


def test_check_shows_the_line_at_which_a_user_task_fails(config: Path) -> None:
    result = call("check", config, "--set", "task.crash=true")
    assert result.exit_code == 1
    assert "FAIL one training step: ZeroDivisionError: integer division or modulo by zero (" in result.output
    assert "test_app.py:" in result.output


def test_configuration_error_is_printed_without_a_traceback(config: Path) -> None:
    result = call("estimate", config, "--set", "method.rounds=none")
    assert result.exit_code == 2
    assert result.output.startswith("error E_CONFIG")
    assert "Traceback" not in result.output


def test_phantom_writes_a_volume_for_each_subject_of_each_site(tmp_path: Path) -> None:
    result = call("phantom", "--out", tmp_path / "brains", "--sites", "2", "--subjects", "3", "--seed", "5")
    assert result.exit_code == 0, result.output
    assert result.output.strip().endswith(": 6 phantoms of 2 sites")
    assert len(list((tmp_path / "brains").glob("sub-*/anat/*_T1w.nii.gz"))) == 6


def test_phantom_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    result = call("phantom", "--out", tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith("error E_DATA")
    assert "is not empty; choose another folder" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--env", "prod"), "--kit"),
        (("--env", "prod", "--kit", "kit", "--resume"), "--resume"),
        (("--env", "prod", "--kit", "kit", "--sites", "3"), "--sites"),
        (("--kit", "kit"), "--kit is for --env prod"),
        (("--env", "poc", "--byoc"), "--byoc is for --env prod"),
        (("--env", "local", "--kit", "kit"), "--kit is for --env prod"),
    ],
)
def test_option_of_another_environment_is_refused(config: Path, options: tuple[str, ...], message: str) -> None:
    result = call("run", str(config), *options)
    assert result.exit_code == 2
    assert message in result.output


def test_local_run_writes_model_and_record_to_the_default_folder(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("run", config, "--env", "local", "--rounds", "1", "--seed", "5", "--set", "method.training.lr=0.01")
    assert result.exit_code == 0, result.output
    written = {path.name for path in (tmp_path / "runs" / "line-local").iterdir()}
    assert {"model.safetensors", "summary.json", "rounds.jsonl", "ledger.jsonl", "config.yaml"} <= written
    again = call("run", config, "--env", "local", "--rounds", "1", "--seed", "5", "--resume")
    assert again.exit_code == 1
    assert "holds no checkpoint" in again.output


def test_check_continues_without_a_simulator_section(config: Path) -> None:
    text = config.read_text()
    config.write_text(text[: text.index("simulator:")])
    result = call("check", str(config))
    assert result.exit_code == 0, result.output
    assert "SKIP sites" in result.output
    assert "PASS method" in result.output
    assert "one training step" not in result.output


def test_export_sends_a_user_task_with_byoc_and_otherwise_tells_how_to_install_it(config: Path, tmp_path: Path) -> None:
    (tmp_path / "line_task.py").write_text((ROOT / "tests" / "integration" / "own_task.py").read_text())
    file = tmp_path / "own.yaml"
    file.write_text("name: own\nmethod: {name: fedavg}\ntask: {class: line_task.SumTask}\n")
    out = tmp_path / "jobs"
    installed = call("export", str(file), "--out", str(out), "--set", "federation.min_sites=1")
    assert installed.exit_code == 0, installed.output
    assert "site allow KIT --also line_task.SumTask" in " ".join(installed.output.split())
    assert not list(out.rglob("custom"))
    byoc = call("export", str(file), "--out", str(out), "--byoc")
    assert byoc.exit_code == 0, byoc.output
    assert list(out.rglob("custom/line_task.py"))
