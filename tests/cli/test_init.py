"""flare-sparse init: every kind of study passes its own check; a table is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from nnunet_data import require_nnunet
from typer.testing import CliRunner, Result

from flare_sparse.cli import app
from flare_sparse.config.study import Study
from flare_sparse.config.yaml_files import STARTERS, find_configuration, list_configurations
from flare_sparse.tasks.data.phantom import write_phantoms


def call(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.mark.parametrize("kind", [kind for kind in STARTERS if kind not in ("component", "nnunet")])
def test_study_of_every_kind_is_valid(kind: str, tmp_path: Path) -> None:
    result = call("init", kind, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert Study.load(tmp_path / "study.yaml").config.simulator is not None
    again = call("init", kind, "--out", tmp_path)
    assert again.exit_code == 2
    assert "exists already" in again.output


@pytest.mark.long
@pytest.mark.parametrize("kind", ["table", "script", "method"])
def test_study_that_is_no_configuration_of_the_package_passes_its_check_and_runs_a_round(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ["init", kind],
        ["check", "study.yaml"],
        ["run", "study.yaml", "--set", "method.rounds=1", "--env", "local"],
    ):
        result = call(*words)
        assert result.exit_code == 0, result.output


@pytest.mark.long
def test_job_with_a_component_runs_and_says_what_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("init", "component").exit_code == 0
    subprocess.run([sys.executable, "job.py"], check=True, capture_output=True, timeout=300)
    (file,) = Path("workspace").rglob("server/simulate_job/sparse_exchange.json")
    sums = json.loads(file.read_text())
    assert sums["sent_bytes"] < sums["dense_bytes"]
    assert "site-1" in sums["sites"]


@pytest.mark.slow
def test_data_of_nnunet_are_planned(tmp_path: Path) -> None:
    require_nnunet()
    result = call("init", "nnunet", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "plan of 10 cases: 3d_fullres, patch [48, 64, 48], batch size 2" in result.output
    study = Study.load(tmp_path / "study.yaml")
    assert study.config.task.name == "nnunet"
    assert len(list((tmp_path / "data").rglob("*_dseg.nii.gz"))) == 10
    refused = call("init", "nnunet", "--out", tmp_path / "other", "--data", tmp_path / "data" / "site-1" / "sub-0101")
    assert refused.exit_code == 2
    assert "expected nnU-Net's dataset.json" in refused.output


@pytest.mark.parametrize(("separator", "mark"), [(",", "."), (";", ",")])
def test_columns_kinds_labels_and_sites_of_a_table_are_filled_in(separator: str, mark: str, tmp_path: Path) -> None:
    table = tmp_path / "cohort.csv"
    lines = [
        f"{n},{'AB'[n % 2]},{50 + n},{'FM'[n % 2]},{n}_{n % 7},free text {n},{'died' if n % 3 else 'healthy'}"
        for n in range(30)
    ]
    text = "\n".join(["patient,hospital,age,sex,marker,remark,outcome", *lines])
    table.write_text(text.replace(",", separator).replace("_", mark))
    result = call("init", "table", "--data", table, "--out", tmp_path / "study")
    assert result.exit_code == 0, result.output
    assert "target outcome: binary of healthy, died" in result.output
    assert "what is predicted, class 1: outcome died" in result.output
    assert "left out, neither numbers nor few labels: remark" in result.output
    written = yaml.safe_load((tmp_path / "study" / "study.yaml").read_text())
    task = written["task"]
    assert task["features"] == ["age", "sex", "marker"]
    assert task.get("decimal", ".") == mark
    # 0.3 times four inputs, age, marker and two labels of sex, through the 21 of the 30 rows that train.
    assert written["method"]["training"]["weight_decay"] == 0.057
    assert (task["categories"], task["classes"], task["id"]) == ({"sex": ["F", "M"]}, ["healthy", "died"], "patient")
    assert written["simulator"]["data"]["partition"] == {"kind": "natural", "column": "hospital"}
    assert Study.load(tmp_path / "study" / "study.yaml").config.name == "study"


def test_scale_of_a_number_is_filled_in(tmp_path: Path) -> None:
    (tmp_path / "ages.csv").write_text("x,age\n" + "".join(f"{n},{20 + n % 3}\n" for n in range(300)))
    assert call("init", "table", "--data", tmp_path / "ages.csv", "--out", tmp_path / "study").exit_code == 0
    assert Study.load(tmp_path / "study" / "study.yaml").config.task.config.target_scale == (21, 0.816)


def test_shapes_labels_and_sites_of_images_are_filled_in(tmp_path: Path) -> None:
    write_phantoms(tmp_path / "brains", 2, 2, 1, labels=True)
    tasks = {}
    for kind in ("brain_age", "segmentation"):
        result = call("init", kind, "--data", tmp_path / "brains", "--out", tmp_path / kind)
        assert result.exit_code == 0, result.output
        config = Study.load(tmp_path / kind / "study.yaml").config
        assert config.simulator is not None
        assert config.simulator.data.partition is not None
        assert config.simulator.data.partition.name == "natural"
        tasks[kind] = yaml.safe_load((tmp_path / kind / "study.yaml").read_text())["task"]
    assert (tasks["brain_age"]["shape"], tasks["brain_age"]["downsample"]) == ([52, 64, 52], 2)
    assert tasks["segmentation"]["classes"] == {"class_1": 1, "class_2": 2, "class_3": 3}
    assert tasks["segmentation"]["patch"] == [48, 64, 48]
    refused = call("init", "brain_age", "--data", tmp_path / "brain_age", "--out", tmp_path / "none")
    assert refused.exit_code == 1
    assert "no BIDS data set" in refused.output
    assert not (tmp_path / "none").exists()


def test_table_that_cannot_be_a_study_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text("id,hospital\n1,A\n2,B\n")
    result = call("init", "table", "--data", tmp_path / "ids.csv", "--out", tmp_path / "study")
    assert result.exit_code == 1
    assert "expected a target and at least one feature" in " ".join(result.output.split())
    assert not (tmp_path / "study").exists()
    assert call("init", "script", "--data", tmp_path / "ids.csv").exit_code == 2


def test_configuration_is_found_by_name_and_a_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "neurosfl_brain_age" in list_configurations()
    for name in ("neurosfl_brain_age", "app_configs/neurosfl_brain_age.yaml"):
        assert Study.load(name).config.name == "neurosfl_brain_age"
    (tmp_path / "neurosfl_brain_age").write_text("own")
    assert find_configuration(Path("neurosfl_brain_age")) == Path("neurosfl_brain_age")
    assert find_configuration(Path("nothing")) == Path("nothing")
