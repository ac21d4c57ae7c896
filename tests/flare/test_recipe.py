"""``SparseRecipe.from_script``: what its arguments become in the job, and arguments that are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.recipe import SparseRecipe
from flare_sparse.flare.workspace import JOB_FILE

NET = """from torch import nn


class Net(nn.Linear):
    def __init__(self, width=3):
        super().__init__(width, 1)


class Sized(nn.Linear):
    def __init__(self, width):
        super().__init__(width, 1)
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SparseRecipe]]:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "client.py").write_text("import nvflare.client\n")
    (tmp_path / "script_net.py").write_text(NET)

    def build(**settings: Any) -> SparseRecipe:
        defaults: dict[str, Any] = {"model": "script_net.Net", "method": "fedavg", "rounds": 1}
        return SparseRecipe.from_script(train_script=tmp_path / "client.py", **{**defaults, **settings})

    yield build
    sys.modules.pop("script_net", None)


def read_task(recipe: SparseRecipe, folder: Path) -> dict[str, Any]:
    """Return the section ``task`` of the job."""
    recipe.export(str(folder / "jobs"))
    task: dict[str, Any] = yaml.safe_load(next((folder / "jobs").rglob(JOB_FILE)).read_text())["task"]
    return task


@pytest.mark.slow
def test_arguments_become_the_task_of_the_job(build: Callable[..., SparseRecipe], tmp_path: Path) -> None:
    options = {"launch": "torchrun --nproc_per_node=2", "metric": "mse", "weigh_by": "examples"}
    recipe = build(train_args="--lr 0.1", federation={"gpus": 2}, **options)
    task = read_task(recipe, tmp_path)
    meta = json.loads(next((tmp_path / "jobs").rglob("meta.json")).read_text())
    assert meta["resource_spec"] == {"@default": {"num_of_gpus": 2}}
    task.pop("split")
    assert task == {
        "script": "client.py",
        "model": "script_net.Net",
        "model_args": {},
        "args": "--lr 0.1",
        "launch": "torchrun --nproc_per_node=2",
        "metric": {"name": "mse", "mode": "max", "unit": ""},
        "weigh_by": "examples",
        "subgroups": [],
        "min_subgroup": 10,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda nets: nets.Net(), ("script_net.Net", {})),
        (lambda nets: nets.Net, ("script_net.Net", {})),
        (lambda _: "script_net.Sized", None),
        (lambda _: {"class_path": "script_net.Net"}, ("script_net.Net", {})),
        (lambda _: {"class_path": "script_net.Sized", "args": {"width": 5}}, ("script_net.Sized", {"width": 5})),
    ],
)
def test_network_is_given_by_instance_class_path_or_arguments(
    build: Callable[..., SparseRecipe], model: Callable[[Any], Any], expected: tuple[str, dict[str, Any]] | None
) -> None:
    network = model(import_module("script_net"))
    if expected is None:
        with pytest.raises(ConfigError, match=r"task.model: script_net.Sized with task.model_args \{\}: .*'width'"):
            build(model=network)
        return
    settings = build(model=network)._config.task.config.model_dump()
    assert (settings["model"], settings["model_args"]) == expected


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda _: {"path": "script_net.Net"}, r"model: expected a network such as Net\(\), its class Net, .* found"),
        (lambda _: {"class_path": "script_net.Net", "arg": {}}, "model: expected a network"),
        (lambda _: 3, "model: expected a network .* found 3"),
        (lambda _: dict, "model: expected a network .* found <class 'dict'>"),
        (lambda nets: nets.Sized, r"script_net.Sized\(\) fails; give its arguments: model=\{\"class_path\": "),
        (lambda nets: nets.Net(5), r"script_net.Net\(\) fails or builds another one; give its arguments"),
        (lambda _: "script_net.Nets", "task.model: 'script_net.Nets' cannot be imported"),
        (lambda _: type("Net", (nn.Linear,), {"__module__": "__main__"}), "move its class to a module beside"),
    ],
)
def test_network_of_another_form_is_refused_with_the_accepted_ones(
    build: Callable[..., SparseRecipe], model: Callable[[Any], Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(model=model(import_module("script_net")))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"task": {"launch": "python"}}, "task: from_script builds this section from its arguments; .* launch"),
        ({"method": {"name": "fedavg", "rounds": 9}}, "leave rounds out of method"),
        ({"packaging": "boyc"}, "packaging: expected one of installed, byoc, found 'boyc'"),
    ],
)
def test_argument_without_effect_is_refused(
    build: Callable[..., SparseRecipe], settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(**settings)
