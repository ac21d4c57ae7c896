"""The filters that one call adds to the jobs of FLARE's recipes, and recipes that are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.filter import Filter
from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedeval import FedEvalRecipe
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe
from nvflare.app_opt.sklearn.recipes.fedavg import SklearnFedAvgRecipe
from nvflare.app_opt.sklearn.recipes.kmeans import KMeansFedAvgRecipe
from nvflare.app_opt.sklearn.recipes.svm import SVMFedAvgRecipe
from nvflare.recipe.spec import Recipe
from torch import nn

from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.any_recipe import add_sparse_exchange
from flare_sparse.flare.site.setup import CLASSES, RECIPE_CLASSES, find_broad_entries

PATH = "flare_sparse.components.sparse_exchange.SparseExchange"


NET = """from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
"""


def build(recipe: type[Recipe], **settings: Any) -> Recipe:
    # A class of its own: FLARE copies the source of the model's class into the job, of torch's classes all of torch.
    net = import_module("recipe_net").Net()
    return recipe(name="study", model=net, min_clients=2, num_rounds=2, train_script="client.py", **settings)


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Recipe], tuple[Any, Any]]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "client.py").write_text("")
    (tmp_path / "recipe_net.py").write_text(NET)

    def export(recipe: Recipe) -> tuple[Any, Any]:
        recipe.export(str(tmp_path / "jobs"))
        config = tmp_path / "jobs" / "study" / "app" / "config"
        return tuple(json.loads((config / f"config_fed_{end}.json").read_text()) for end in ("server", "client"))

    yield export
    sys.modules.pop("recipe_net", None)


@pytest.mark.parametrize("recipe", [FedAvgRecipe, FedOptRecipe, FedProxRecipe, ScaffoldRecipe, CyclicRecipe])
def test_filter_is_in_every_chain_of_the_training_task(
    recipe: type[Recipe], export: Callable[[Recipe], tuple[Any, Any]], tmp_path: Path
) -> None:
    job = build(recipe)
    add_sparse_exchange(job, keep=0.1, values="bfloat16", mask=["*"], error_feedback=False)
    args = {"keep": 0.1, "values": "bfloat16", "mask": ["*"], "error_feedback": False}
    for config in export(job):
        for chain in ("task_data_filters", "task_result_filters"):
            assert config[chain] == [{"tasks": ["train"], "filters": [{"path": PATH, "args": args}]}]
    assert not (tmp_path / "jobs" / "study" / "app" / "custom" / "flare_sparse").exists()


@pytest.mark.slow
def test_filter_encodes_last_and_decodes_first(export: Callable[[Recipe], tuple[Any, Any]]) -> None:
    job = build(FedAvgRecipe)
    for add in (
        job.add_server_output_filter,
        job.add_server_input_filter,
        job.add_client_output_filter,
        job.add_client_input_filter,
    ):
        add(ExcludeVars("head"), tasks=["train"])
    add_sparse_exchange(job, keep=0.1)
    server, client = export(job)

    def find_position(config: Any, chain: str) -> int:
        return [row["path"] for row in config[chain][0]["filters"]].index(PATH)

    assert (find_position(server, "task_data_filters"), find_position(client, "task_data_filters")) == (1, 0)
    assert (find_position(client, "task_result_filters"), find_position(server, "task_result_filters")) == (1, 0)


def test_swarm_codes_the_messages_between_sites_in_both_directions(
    export: Callable[[Recipe], tuple[Any, Any]],
) -> None:
    job = build(SwarmLearningRecipe)
    add_sparse_exchange(job, keep=0.1)
    server, client = export(job)
    assert [
        (row["tasks"], row["direction"], row["filters"][0]["args"]["content"]) for row in client["task_data_filters"]
    ] == [
        (["swarm_learn"], "inout", "model"),
        (["swarm_report_learn_result"], "inout", "update"),
    ]
    assert {row["filters"][0]["path"] for row in client["task_data_filters"]} == {PATH}
    assert server["task_data_filters"] == server["task_result_filters"] == client["task_result_filters"] == []


def test_task_may_be_given_as_text(export: Callable[[Recipe], tuple[Any, Any]]) -> None:
    job = build(FedAvgRecipe)
    add_sparse_exchange(job, keep=0.1, tasks="train")
    for config in export(job):
        assert [row["tasks"] for row in config["task_data_filters"] + config["task_result_filters"]] == [["train"]] * 2


def test_package_travels_with_a_byoc_job(export: Callable[[Recipe], tuple[Any, Any]], tmp_path: Path) -> None:
    job = build(FedAvgRecipe)
    add_sparse_exchange(job, keep=0.1, packaging="byoc")
    export(job)
    assert (tmp_path / "jobs" / "study" / "app" / "custom" / "flare_sparse" / "wire" / "codec.py").is_file()


def test_filter_may_be_allowed_by_name_and_is_not_allowed_unasked() -> None:
    assert PATH in RECIPE_CLASSES
    assert PATH not in CLASSES
    assert find_broad_entries([PATH, "flare_sparse.flare."]) == ["flare_sparse.flare."]


class HEModelEncryptor(Filter):
    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        return shareable


def add_encryption(job: Recipe) -> None:
    job.add_client_output_filter(HEModelEncryptor(), tasks=["train"])


@pytest.mark.usefixtures("export")
@pytest.mark.parametrize(
    ("recipe", "change", "reason"),
    [
        (FedAvgRecipe, add_encryption, "FedAvgRecipe: its updates are encrypted"),
        (FedAvgRecipe, lambda job: job.enable_tensor_streaming("numpy"), "tensor streaming takes the tensors out"),
        (FedAvgRecipe, add_sparse_exchange, "called before; call it once"),
        (SwarmLearningRecipe, lambda job: job.add_client_input_filter(ExcludeVars("a"), tasks=["x"]), "by hand"),
    ],
)
def test_recipe_that_cannot_be_served_is_refused_with_the_reason(
    recipe: type[Recipe], change: Callable[[Recipe], None], reason: str
) -> None:
    job = build(recipe)
    change(job)
    with pytest.raises(ConfigError, match=reason):
        add_sparse_exchange(job, keep=0.1)


def build_sklearn_recipes() -> Iterator[Recipe]:
    common = {"name": "study", "min_clients": 2, "train_script": "client.py"}
    yield SklearnFedAvgRecipe(num_rounds=2, model_params={"n_classes": 2}, **common)
    yield KMeansFedAvgRecipe(num_rounds=2, n_clusters=3, **common)
    yield SVMFedAvgRecipe(kernel="rbf", **common)


class XGBModelPersistor(FLComponent):
    """In the place of FLARE's, which cannot be imported without xgboost."""


def test_recipe_whose_models_are_no_arrays_is_refused(export: Callable[[Recipe], tuple[Any, Any]]) -> None:
    trees = build(FedAvgRecipe)
    trees._job.to_server(XGBModelPersistor(), id="trees")
    for recipe in (*build_sklearn_recipes(), trees):
        kept = "XGBModelPersistor" if recipe is trees else "JoblibModelParamPersistor"
        expected = rf"{type(recipe).__name__}: its models are no arrays of numbers \({kept} keeps"
        with pytest.raises(ConfigError, match=expected):
            add_sparse_exchange(recipe)


def test_recipe_without_training_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.py").write_text("")
    job = FedEvalRecipe(name="study", model=nn.Linear(3, 1), min_clients=2, eval_script="client.py", eval_ckpt="/m.pt")
    with pytest.raises(ConfigError, match=r"FedEvalRecipe: its server sends no model that sites train"):
        add_sparse_exchange(job)


@pytest.mark.usefixtures("export")
@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"keep": 0}, "keep: expected"),
        ({"values": "float8"}, "values: expected"),
        ({"mask": []}, "mask: expected"),
        ({"error_feedback": "no"}, "error_feedback: expected true or false, found 'no'"),
        ({"tasks": []}, r"tasks: expected names of FLARE tasks, such as \['train'\], found \[\]"),
        ({"tasks": [""]}, "tasks: expected"),
        ({"packaging": "boyc"}, "packaging: expected one of installed, byoc, found 'boyc'"),
    ],
)
def test_invalid_setting_is_refused_before_the_job_runs(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        add_sparse_exchange(build(FedAvgRecipe), **settings)
