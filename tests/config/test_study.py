"""A study: settings with the folder that they came from, task, run id and user code."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare_sparse.config.study import Study
from flare_sparse.core.errors import ConfigError

TASK = """
from torch import nn

from flare_sparse import Metric, Task
import helper


class Own(Task):
    metric = Metric("mae", "", "min")

    def model(self):
        return nn.Linear(helper.WIDTH, 1)

    def load(self, data, seed): ...
    def loss(self, model, batch): ...
    def predict(self, model, batch): ...
    def metrics(self, predictions, targets): ...
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "study_task.py").write_text(TASK)
    (tmp_path / "helper.py").write_text("WIDTH = 3\n")
    file = tmp_path / "own.yaml"
    file.write_text("name: own\nmethod: {name: fedavg, rounds: 2}\ntask: {class: study_task.Own}\n")
    return file


def test_study_finds_the_task_and_what_it_imports_beside_the_configuration(file: Path) -> None:
    study = Study.load(file)
    assert study.folder == file.parent
    assert study.assembly.layout.size == 4
    assert [path.name for path in study.user_code] == ["helper.py", "study_task.py"]
    assert study.load_task() is not study.assembly.task


def test_run_id_follows_the_settings_of_the_job(file: Path) -> None:
    run_id = Study.load(file).run_id
    assert Study.load(file, ["method.rounds=2"]).run_id == run_id
    assert Study.load(file, ["method.rounds=3"]).run_id != run_id
    assert Study.load(file, ["simulator={sites: 2, data: {path: '{site}'}}"]).run_id == run_id


def test_sites_of_a_study_without_a_simulator_section_are_not_here(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="simulator: missing"):
        Study.load(file).prepare_sites(tmp_path)
