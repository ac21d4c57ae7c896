"""The user's own code travels whole: what a module or a script imports is found, packages as wholes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_sparse.config.loading import load_config
from flare_sparse.config.study import prepare_site_data
from flare_sparse.config.user_classes import CODE_FOLDER, list_user_code, load_task
from flare_sparse.config.user_code import collect_user_code, import_user_module
from flare_sparse.core.errors import ConfigError

SCRIPT = """
name: study
method: {name: fedavg, rounds: 1}
task: {script: train/client.py, model: nets.Net, model_args: {width: 3}}
"""


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.path[:] = path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_imports_are_followed_through_files_and_packages(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "study/__init__.py": "",
            "study/tasks.py": "import numpy\nfrom .layers import Block\nfrom helpers.io import read",
            "study/layers.py": "def build():\n    import late",
            "helpers/io.py": "import json, os.path",
            "late.py": "",
            "json.py": "",
            "unused.py": "",
        },
    )
    code = collect_user_code([tmp_path], modules=["study.tasks"])
    assert code == {"helpers": tmp_path / "helpers", "late": tmp_path / "late.py", "study": tmp_path / "study"}


def test_folder_without_modules_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path, {"task.py": "import data, broken", "broken.py": "def ("})
    assert set(collect_user_code([tmp_path], modules=["task"])) == {"task", "broken"}


def test_data_files_and_modules_with_a_computed_name_stay_behind(tmp_path: Path) -> None:
    script = "import importlib, study\nimportlib.import_module('plugin')\nopen('table.csv')"
    write(tmp_path, {"client.py": script, "plugin.py": "", "table.csv": "", "study/__init__.py": ""})
    code = collect_user_code([tmp_path], files=[tmp_path / "client.py"])
    assert code == {"study": tmp_path / "study"}


def test_module_of_the_same_name_in_another_folder_is_imported_anew(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write(tmp_path / name, {"own_module.py": f"from own_helper import value\nname = {name!r}",
                                "own_helper.py": f"value = {name!r}"})  # fmt: skip
    first = import_user_module("own_module", [tmp_path / "first"])
    assert import_user_module("own_module", [tmp_path / "first"]) is first
    second = import_user_module("own_module", [tmp_path / "second"])
    assert (first.name, first.value, second.name, second.value) == ("first", "first", "second", "second")


SETTINGS = "kind: binary, target: died, features: [age]"
TASK = """
from flare_sparse import Metric
from flare_sparse.tasks.table import TableTask
from .scale import SCALE
import units

class Heart(TableTask):
    metric = Metric("auc", "", "max")
"""


@pytest.mark.parametrize("module", ["tasks_of_heart", "mystudy.tasks_of_heart"])
def test_code_of_a_task_is_its_package_and_what_it_imports(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "study"
    in_package = module.startswith("mystudy")
    folder = base / "mystudy" if in_package else base
    source = TASK if in_package else TASK.replace("from .scale", "from scale")
    write(folder, {"tasks_of_heart.py": source, "scale.py": "SCALE = 2"})
    write(
        base,
        {
            "units.py": "",
            "config.yaml": f"name: h\nmethod: {{name: fedavg}}\ntask: {{class: {module}.Heart, {SETTINGS}}}",
        },
    )
    monkeypatch.chdir(tmp_path)
    code = list_user_code(load_config(base / "config.yaml"), base)
    expected = ["mystudy", "units.py"] if in_package else ["scale.py", "tasks_of_heart.py", "units.py"]
    assert [path.relative_to(base).as_posix() for path in code] == expected


def test_installed_task_has_no_code_to_send(tmp_path: Path) -> None:
    write(tmp_path, {"config.yaml": "name: b\nmethod: {name: fedavg}\ntask: {name: brain_age}"})
    assert list_user_code(load_config(tmp_path / "config.yaml"), tmp_path) == ()


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script in a subfolder with a helper beside it, and a network in a package beside the configuration."""
    write(
        tmp_path / "study",
        {
            "config.yaml": SCRIPT,
            "train/client.py": "import nvflare.client as flare\nfrom metrics_of_study import auc\nfrom nets import Net",
            "train/metrics_of_study.py": "def auc(): ...",
            "nets/__init__.py": "from .net import Net",
            "nets/net.py": "from torch import nn\nclass Net(nn.Linear):\n    def __init__(self, width=1):\n"
            "        super().__init__(width, 1)\ndef build(width=1):\n    return Net(width)\nclass Other(Net):\n"
            "    def __new__(cls, width=1):\n        return Net(width)\n",
        },
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path / "study" / "config.yaml"


def test_code_of_a_script_is_listed_from_any_working_directory(study: Path) -> None:
    code = list_user_code(load_config(study), study.parent)
    assert [path.relative_to(study.parent).as_posix() for path in code] == [
        "train/client.py",
        "train/metrics_of_study.py",
        "nets",
    ]


def test_installed_network_of_a_script_does_not_travel(study: Path) -> None:
    study.write_text(SCRIPT.replace("nets.Net", "torch.nn.Linear"))
    study.with_name("train").joinpath("client.py").write_text("import torch")
    # Reading the sources of torch and of all that it imports takes many minutes.
    assert [path.name for path in list_user_code(load_config(study), study.parent)] == ["client.py"]


def test_data_of_a_script_is_optional_and_not_partitioned_for_it(study: Path) -> None:
    study.write_text(f"{SCRIPT}simulator: {{sites: 2}}")
    config = load_config(study)
    task = load_task(config, study.parent)
    assert {data.path for data in prepare_site_data(config, task, study.parent).values()} == {study.parent}
    study.write_text(f"{SCRIPT}simulator: {{data: {{path: ., partition: {{kind: natural}}}}}}")
    with pytest.raises(ConfigError, match="a training script divides its data itself; set partition: "):
        prepare_site_data(load_config(study), task, study.parent)


def test_network_of_a_script_is_built_with_its_arguments(study: Path) -> None:
    task = load_task(load_config(study), study.parent)
    assert task.model().in_features == 3
    assert (task.metric.name, task.metric.mode, task.metric.may_be_undefined) == ("accuracy", "max", True)


def test_code_in_a_result_folder_is_found(study: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    study.parent.joinpath("train").rename(study.parent / "elsewhere")
    (run / CODE_FOLDER).mkdir(parents=True)
    (study.parent / "nets").rename(run / CODE_FOLDER / "nets")
    assert load_task(load_config(study), run).model().in_features == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train/client.py", "train/other.py", "task.script: there is no file train/other.py in"),
        ("nets.Net", "nets.Missing", "task.model: 'nets.Missing' cannot be imported"),
        ("nets.Net", "nets.net.nn", "expected a class of torch networks"),
        ("nets.Net", "nets.net.build", "call peft.get_peft_model and the like in its __init__"),
        ("nets.Net", "nets.net.Other", "task.model: nets.net.Other() is a Net; expected a network of the class"),
        ("width: 3", "depth: 3", "task.model: nets.Net with task.model_args {'depth': 3}"),
    ],
)
def test_missing_parts_are_named(study: Path, old: str, new: str, message: str) -> None:
    study.write_text(SCRIPT.replace(old, new))
    config = load_config(study)
    with pytest.raises(ConfigError, match=re.escape(message)):
        (list_user_code if "script" in message else load_task)(config, study.parent)


def test_script_that_is_no_python_is_named_with_its_line(study: Path) -> None:
    study.with_name("train").joinpath("client.py").write_text("x = 1\ndef (")
    with pytest.raises(ConfigError, match=r"client.py:2: invalid syntax"):
        list_user_code(load_config(study), study.parent)
