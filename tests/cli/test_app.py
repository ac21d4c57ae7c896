"""The command line: help texts, refused options, output and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
from line import call
from typer.main import get_command
from typer.testing import CliRunner

from flare_sparse.cli import app
from flare_sparse.cli.console import locate_pages
from flare_sparse.methods.registry import METHODS
from flare_sparse.tasks.registry import TASKS

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "run",
    "watch",
    "check",
    "describe",
    "estimate",
    "export",
    "settings",
    "phantom",
    "save",
    "site",
}


def test_installed_command_is_this_app(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (entry,) = [e for e in entry_points(group="console_scripts") if e.name == "flare-sparse"]
    monkeypatch.setattr("sys.argv", ["flare-sparse", "--version"])
    with pytest.raises(SystemExit) as ended:
        entry.load()()
    assert not ended.value.code
    assert version("flare-sparse") in capsys.readouterr().out


def test_help_shows_a_first_command_and_lists_all_commands() -> None:
    result = call("--help")
    assert result.exit_code == 0
    assert "flare-sparse run neurosfl_brain_age" in result.output
    assert {name for name in COMMANDS if f" {name} " in result.output} == COMMANDS
    assert (ROOT / "app_configs/neurosfl_brain_age.yaml").is_file()


def test_path_that_cannot_be_written_is_named_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "brains").write_text("a file")
    result = call("phantom", tmp_path / "brains" / "new", "--sites", "1", "--subjects", "1")
    assert result.exit_code == 2
    assert str(tmp_path / "brains") in result.output.replace("\n", "")
    assert "Not a directory; name another path" in result.output.replace("\n", " ")
    assert (tmp_path / "brains").read_text() == "a file"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_of_every_command_has_an_example(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0
    assert f"flare-sparse {name} " in result.output.replace("\n", " ")


def test_every_example_of_describe_has_a_line_of_its_own() -> None:
    examples = [line.strip() for line in call("describe", "--help").output.splitlines() if " study.yaml" in line]
    assert examples == [
        "flare-sparse describe study.yaml",
        "flare-sparse describe study.yaml --kit kits/lead@our.org",
    ]


def test_command_line_has_at_most_60_options() -> None:
    """What two commands do alike is one option, and what a setting can say is none."""
    tops = get_command(app).commands.values()
    commands = [command for top in tops for command in getattr(top, "commands", {"": top}).values()]
    options = [option for command in commands for option in command.params if option.param_type_name == "option"]
    assert 40 < len([option for option in options if option.name != "help"]) <= 60


@pytest.mark.slow
def test_help_of_no_command_waits_for_large_libraries() -> None:
    code = """import sys
import flare_sparse.cli
print(*{"torch", "nvflare", "monai", "numpy"} & set(sys.modules))"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"\n"


def test_help_wraps_whole_paragraphs() -> None:
    # As wide as a paragraph, so that every break is one of the source.
    output = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "1000"}).output
    assert "Unless --env is given, the job runs in FLARE's simulator. The section deployment" in output


def test_version_option_prints_the_installed_version() -> None:
    assert call("--version").output == f"flare-sparse {version('flare-sparse')}\n"


def test_methods_lists_every_method_with_its_source() -> None:
    lines = call("settings").output.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(METHODS)]] == list(METHODS)
    assert "A method of your own is one class: docs/new-method.md" in lines
    (neurosfl,) = [line for line in lines if line.startswith("neurosfl")]
    assert neurosfl.rstrip().endswith("NeuroSFL (Thapaliya et al. 2024), Algorithm 1")


def test_methods_shows_every_setting_with_default_and_range() -> None:
    lines = call("settings", "fedsparsify").output.splitlines()
    (sparsity,) = [line for line in lines if line.startswith("method.sparsity ")]
    assert "0.9" in sparsity
    assert "a number, >= 0, < 1" in sparsity
    assert any(line.startswith("method.training.lr ") for line in lines)


def test_methods_shows_a_methods_own_defaults_of_a_section() -> None:
    lines = call("settings", "lora_a2").output.splitlines()
    rows = {words[0]: words[1] for words in map(str.split, lines) if len(words) > 1}
    assert rows["method.training.optimizer"] == "adamw"
    assert rows["method.training.epochs"] == "5"


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_settings_of_methods_are_whole_in_80_columns(name: str) -> None:
    lines = call("settings", name, columns=80).output.splitlines()
    # A section such as training has a row for each of its settings.
    shown = {".".join(line.split()[0].split(".")[:2]) for line in lines if line.strip()}
    assert {f"method.{setting}" for setting in METHODS[name].Config.model_fields} - shown == set()


def test_tasks_lists_every_task_with_metric_and_data() -> None:
    lines = call("settings").output.splitlines()
    found = [line.split()[0] for line in lines[1:] if line.strip()]
    assert [name for name in found if name in TASKS] == list(TASKS)
    (images,) = [line for line in lines if line.startswith("image_classification")]
    for cell in (
        "Prediction of an image's class  ",
        "accuracy, higher is better",
        "an npz file with arrays <split>_images",
    ):
        assert cell in images


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("columns", [80, 200])
def test_tasks_shows_every_setting_of_a_task_whole(name: str, columns: int) -> None:
    output = call("settings", name, columns=columns).output
    shown = {".".join(line.split()[0].split(".")[:2]) for line in output.splitlines() if line.strip()}
    assert {f"task.{setting}" for setting in TASKS[name].Config.model_fields} - shown == set()
    assert f"metric: {TASKS[name].metric.name}" in output
    assert f"data:   {TASKS[name].reads}" in output


def test_tasks_shows_defaults_of_the_network_and_of_a_task_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = call("settings", "brain_age").output.splitlines()
    rows = {name: cells.strip() for name, _, cells in (line.partition(" ") for line in lines)}
    assert rows["task.age_mean"].split()[0] == "45.0"
    assert rows["task.model.name"].startswith("brain_age_cnn_3mm")
    (tmp_path / "line_task.py").write_text((ROOT / "tests" / "integration" / "own_task.py").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "line_task", raising=False)
    own = call("settings", "line_task.SumTask").output
    assert "task.width" in own
    assert "metric: mse, lower is better" in own


def test_unknown_task_suggests_the_closest_name() -> None:
    result = call("settings", "brain_aeg")
    assert result.exit_code == 2
    assert "Did you mean 'brain_age'?" in result.output


def test_local_run_locates_an_error_of_the_users_task(config: Path, tmp_path: Path) -> None:
    result = call("run", config, "--env", "local", "--out", tmp_path / "run", "--set", "task.crash=true")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    failure = "site-1: round 1 (train) failed: ZeroDivisionError: integer division or modulo by zero at "
    assert failure in result.output
    report = tmp_path / "run" / "site_errors" / "site-1.txt"
    assert f"in loss: return batch[0].sum() * (1 // 0); see {report}" in result.output
    assert "error E_QUORUM (docs/troubleshooting.md)" in result.output
    assert result.output.rstrip().endswith("No round was committed.")


def test_unknown_method_exits_with_2_and_suggests_the_closest_name() -> None:
    result = call("settings", "neurosfll")
    assert result.exit_code == 2
    assert "Did you mean 'neurosfl'?" in result.output
    assert "Traceback" not in result.output


def test_configuration_error_is_printed_without_a_traceback(config: Path) -> None:
    result = call("estimate", config, "--set", "method.rounds=none")
    assert result.exit_code == 2
    assert result.output.startswith("error E_CONFIG")
    assert "Traceback" not in result.output


def test_phantom_writes_a_volume_for_each_subject_of_each_site(tmp_path: Path) -> None:
    result = call("phantom", tmp_path / "brains", "--sites", "2", "--subjects", "3", "--seed", "5")
    assert result.exit_code == 0, result.output
    assert result.output.strip().endswith(": 6 phantoms of 2 sites")
    assert len(list((tmp_path / "brains").glob("sub-*/anat/*_T1w.nii.gz"))) == 6


def test_phantom_refuses_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    result = call("phantom", tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith("error E_DATA")
    assert "is not empty; choose another folder" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--env", "prod"), "--kit"),
        (("--kit", "kit"), "--kit is for --env prod"),
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
    result = call(
        "run",
        config,
        "--env",
        "local",
        "--set",
        "method.rounds=1",
        "--set",
        "seed=5",
        "--set",
        "method.training.lr=0.01",
    )
    assert result.exit_code == 0, result.output
    written = {path.name for path in (tmp_path / "runs" / "line-local").iterdir()}
    assert {"model.safetensors", "summary.json", "rounds.jsonl", "ledger.jsonl", "config.yaml"} <= written
    again = call("run", config, "--env", "local", "--set", "method.rounds=1", "--set", "seed=5", "--start", "last")
    assert again.exit_code == 1
    assert "holds no checkpoint" in again.output


@pytest.mark.slow
def test_export_sends_a_user_task_with_byoc_and_otherwise_tells_how_to_install_it(config: Path, tmp_path: Path) -> None:
    (tmp_path / "line_task.py").write_text((ROOT / "tests" / "integration" / "own_task.py").read_text())
    file = tmp_path / "own.yaml"
    file.write_text("name: own\nmethod: {name: fedavg}\ntask: {class: line_task.SumTask}\n")
    out = tmp_path / "jobs"
    installed = call("export", str(file), "--out", str(out), "--set", "federation.min_sites=1")
    assert installed.exit_code == 0, installed.output
    assert "site setup KIT --also line_task.SumTask" in " ".join(installed.output.split())
    assert not list(out.rglob("custom"))
    byoc = call("export", str(file), "--out", str(out), "--set", "deployment.packaging=byoc")
    assert byoc.exit_code == 0, byoc.output
    assert list(out.rglob("custom/line_task.py"))


def test_figures_of_one_method_are_not_asked_for_beside_a_comparison() -> None:
    result = call("estimate", "neurosfl_brain_age", "--methods", "fedavg,neurosfl", "--subjects", "20")
    assert result.exit_code == 2
    assert "--subjects is for one method" in result.output


def test_pages_that_a_text_names_can_be_opened_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert locate_pages("see docs/names.md") == "see docs/names.md"
    monkeypatch.chdir(tmp_path)
    found = locate_pages("E_QUORUM (docs/troubleshooting.md), docs/readers/it.md")
    pages = [Path(word.strip("(),")) for word in found.split()[1:]]
    assert [page.name for page in pages] == ["troubleshooting.md", "it.md"]
    assert all(page.is_file() for page in pages)


def test_pages_that_the_package_names_exist_and_travel_in_the_wheel() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "custom").rglob("*.py")}
    named = {page for text in texts.values() for page in re.findall(r"docs/[\w./-]+\.md", text)}
    assert len(named) > 20
    assert [page for page in named - {"docs/NAME.md"} if not (ROOT / page).is_file()] == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert settings["wheel"]["force-include"]["docs"] == "flare_sparse/docs"
    assert "/docs" in settings["sdist"]["include"]
