"""Components in FLARE's configuration files: recipes export their arguments, and stock jobs are built of them."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from nvflare.apis.filter import Filter
from nvflare.apis.fl_component import FLComponent
from nvflare.app_common.filters.exclude_vars import ExcludeVars
from nvflare.app_opt.pt.job_config.base_fed_job import BaseFedJob
from nvflare.app_opt.pt.recipes.cyclic import CyclicRecipe
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.app_opt.pt.recipes.fedopt import FedOptRecipe
from nvflare.app_opt.pt.recipes.fedprox import FedProxRecipe
from nvflare.app_opt.pt.recipes.scaffold import ScaffoldRecipe
from nvflare.app_opt.pt.recipes.swarm import SwarmLearningRecipe
from nvflare.app_opt.sklearn.recipes.fedavg import SklearnFedAvgRecipe
from nvflare.app_opt.sklearn.recipes.kmeans import KMeansFedAvgRecipe
from nvflare.app_opt.sklearn.recipes.svm import SVMFedAvgRecipe
from nvflare.fuel.utils.class_loader import load_class
from nvflare.recipe.spec import Recipe

import flare_sparse.components as public
from flare_sparse.components import (
    ChannelUpload,
    FlexLoRAMean,
    FromCSR,
    KeepMask,
    MagnitudePruning,
    MaskedTraining,
    MetaGaterController,
    MetaStep,
    NeuroSFLController,
    OrderedMean,
    RankMean,
    RankUpload,
    ScoredMask,
    SelectiveSum,
    SparseExchange,
    ToCSR,
    add_components,
)
from flare_sparse.components.recipes import require_package
from flare_sparse.core.errors import ConfigError
from flare_sparse.flare.site.setup import RECIPE_CLASSES

NET = """from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
"""
ROOT = Path(__file__).parents[2]
STOCK = ROOT / "jobs" / "stock"
JOBS = ("fedsparsify", "scbf", "neurosfl", "lora_a2", "metagater")


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Recipe], tuple[Any, Any]]]:
    """Export a recipe and return the configuration of server and clients."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "client.py").write_text("")
    # A class of its own: FLARE copies the source of the model's class into the job, of torch's classes all of torch.
    (tmp_path / "stock_net.py").write_text(NET)

    def run(recipe: Recipe) -> tuple[Any, Any]:
        require_package(recipe)
        recipe.export("jobs")
        config = tmp_path / "jobs" / "study" / "app" / "config"
        server, client = ((config / f"config_fed_{end}.json").read_text() for end in ("server", "client"))
        return json.loads(server), json.loads(client)

    yield run
    sys.modules.pop("stock_net", None)


def build_network() -> Any:
    return import_module("stock_net").Net()


def build(entry: dict[str, Any]) -> Any:
    """Build a component as FLARE does from its entry in a configuration."""
    args = {
        key: build(value) if isinstance(value, dict) and "path" in value else value
        for key, value in entry.get("args", {}).items()
    }
    return load_class(entry["path"])(**args)


def list_arguments(component: Any) -> dict[str, Any]:
    names = inspect.signature(type(component).__init__).parameters.keys() - {"self", "args", "kwargs"}
    return {name: getattr(component, name) for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    "aggregator",
    [OrderedMean(min_sites=2), MagnitudePruning(0.7), SelectiveSum("mean"), ScoredMask(0.5), RankMean("b_only"),
     FlexLoRAMean(ranks={"site-1": 2}), MetaStep(lasso=0.5)],
    ids=lambda a: type(a).__name__,
)  # fmt: skip
def test_aggregator_of_a_recipe_is_exported_with_what_matters(
    aggregator: Any, export: Callable[[Recipe], tuple[Any, Any]]
) -> None:
    recipe = FedAvgRecipe(
        name="study",
        min_clients=2,
        num_rounds=2,
        model=build_network(),
        train_script="client.py",
        aggregator=aggregator,
    )
    server, _ = export(recipe)
    entry = server["workflows"][0]["args"]["aggregator"]
    assert set(aggregator._always_serialize_args) <= entry["args"].keys()
    assert list_arguments(build(entry)) == list_arguments(aggregator)


@pytest.mark.slow
def test_filters_of_a_recipe_are_exported_with_what_matters(export: Callable[[Recipe], tuple[Any, Any]]) -> None:
    recipe = FedAvgRecipe(name="study", min_clients=2, num_rounds=2, model=build_network(), train_script="client.py")
    filters = [KeepMask(), ChannelUpload(0.3), RankUpload(8, heads=["head.*"]), ToCSR(), FromCSR(100)]
    add_components(recipe, client_output=filters)
    _, client = export(recipe)
    (chain,) = client["task_result_filters"]
    assert [entry["args"].keys() >= set(getattr(f, "_always_serialize_args", ())) for entry, f in
            zip(chain["filters"], filters, strict=True)] == [True] * 5  # fmt: skip
    assert [list_arguments(build(entry)) for entry in chain["filters"]] == [list_arguments(item) for item in filters]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAvgRecipe, FedOptRecipe, FedProxRecipe, ScaffoldRecipe, CyclicRecipe])
def test_exchange_of_a_recipe_encodes_last_and_decodes_first(
    kind: type[Recipe], export: Callable[[Recipe], tuple[Any, Any]]
) -> None:
    recipe = kind(name="study", min_clients=2, num_rounds=2, model=build_network(), train_script="client.py")
    recipe.add_client_output_filter(ExcludeVars("head"), tasks=["train"])
    exchange = SparseExchange(keep=0.1, values="bfloat16", mask=["*"], error_feedback=False)
    add_components(recipe, exchange=exchange, client_output=[KeepMask()], client_input=[ExcludeVars("head")])
    server, client = export(recipe)
    names = [
        [entry["path"].rpartition(".")[2] for row in config[chain] for entry in row["filters"]]
        for config in (server, client)
        for chain in ("task_data_filters", "task_result_filters")
    ]
    sent = ["ExcludeVars", "KeepMask", "SparseExchange"]
    assert names == [["SparseExchange"], ["SparseExchange"], ["SparseExchange", "ExcludeVars"], sent]
    entry = client["task_result_filters"][0]["filters"][-1]
    assert entry["args"] == {"keep": 0.1, "values": "bfloat16", "mask": ["*"], "error_feedback": False}


def test_exchange_of_a_swarm_codes_the_messages_between_sites(export: Callable[[Recipe], tuple[Any, Any]]) -> None:
    recipe = SwarmLearningRecipe(
        name="study", min_clients=2, num_rounds=2, model=build_network(), train_script="client.py"
    )
    add_components(recipe, exchange=SparseExchange(keep=0.1))
    server, client = export(recipe)
    assert [(row["tasks"], row["direction"], row["filters"][0]["args"]["content"]) for row in
            client["task_data_filters"]] == [
        (["swarm_learn"], "inout", "model"),
        (["swarm_report_learn_result"], "inout", "update"),
    ]  # fmt: skip
    assert all(build(row["filters"][0]).keep == 0.1 for row in client["task_data_filters"])
    assert server["task_data_filters"] == server["task_result_filters"] == client["task_result_filters"] == []


class HEModelEncryptor(Filter):
    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        return shareable


class XGBModelPersistor(FLComponent):
    """In the place of FLARE's, which cannot be imported without xgboost."""


def build_refused() -> Iterator[tuple[Recipe, str]]:
    common: dict[str, Any] = {"name": "study", "min_clients": 2, "train_script": "client.py"}
    network = {"num_rounds": 2, "model": build_network(), **common}
    yield SklearnFedAvgRecipe(num_rounds=2, model_params={"n_classes": 2}, **common), "JoblibModelParamPersistor keeps"
    yield KMeansFedAvgRecipe(num_rounds=2, n_clusters=3, **common), "JoblibModelParamPersistor keeps"
    yield SVMFedAvgRecipe(kernel="rbf", **common), "JoblibModelParamPersistor keeps"
    trees, encrypted, streamed = (FedAvgRecipe(**network) for _ in range(3))
    trees._job.to_server(XGBModelPersistor(), id="trees")
    yield trees, "XGBModelPersistor keeps"
    encrypted.add_client_output_filter(HEModelEncryptor(), tasks=["train"])
    yield encrypted, "its updates are encrypted"
    streamed.enable_tensor_streaming("numpy")
    yield streamed, "tensor streaming takes the tensors out"


@pytest.mark.usefixtures("export")
def test_recipe_that_an_exchange_cannot_serve_is_refused_with_the_reason() -> None:
    for recipe, reason in build_refused():
        with pytest.raises(ConfigError, match=f"{type(recipe).__name__}: .*{reason}"):
            add_components(recipe, exchange=SparseExchange())


@pytest.mark.slow
@pytest.mark.parametrize(
    "controller",
    [NeuroSFLController(num_clients=2, num_rounds=3, aggregator=ScoredMask(0.5, settings={"min_per_layer": 4})),
     MetaGaterController(num_clients=2, num_rounds=3, aggregator=MetaStep(0.3, lasso=1e-3), adapt_task="adapt")],
    ids=lambda c: type(c).__name__,
)  # fmt: skip
def test_controller_is_exported_with_what_matters(controller: Any, export: Callable[[Recipe], tuple[Any, Any]]) -> None:
    job = BaseFedJob(initial_model=build_network(), name="study", min_clients=2)
    job.to_server(controller)
    job.to_clients(MaskedTraining("in_process", task_script_path="client.py"), tasks=["train"])
    server, client = export(Recipe(job))
    entry = server["workflows"][0]
    rebuilt = build(entry)
    assert set(type(controller)._always_serialize_args) <= entry["args"].keys()
    assert set(controller.aggregator._always_serialize_args) <= entry["args"]["aggregator"]["args"].keys()
    own = list_arguments(controller) | list_arguments(controller.aggregator)
    assert own == list_arguments(rebuilt) | list_arguments(rebuilt.aggregator) | {"aggregator": controller.aggregator}
    names = ["num_clients", "num_rounds", "fedprox_mu", "_ignore_result_error"]
    assert [getattr(rebuilt, name) for name in names] == [getattr(controller, name) for name in names]
    assert rebuilt._ignore_result_error is True
    executor = client["executors"][0]["executor"]
    assert executor["path"] == "flare_sparse.components.masking.MaskedTraining"
    assert executor["args"] == {"execution_mode": "in_process", "task_script_path": "client.py"}


def iterate_entries(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the outermost entries of components in a configuration."""
    if isinstance(value, dict) and "path" in value:
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from iterate_entries(part)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stock jobs as they are submitted: with their code as files, because FLARE signs no symbolic links."""
    folder = tmp_path_factory.mktemp("stock")
    subprocess.run([STOCK / "build", folder], check=True)
    return folder


@pytest.mark.slow  # peft imports transformers
@pytest.mark.parametrize("job", JOBS)
def test_stock_job_is_built_of_components_and_classes_of_flare(
    job: str, stock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = stock / job / "app"
    monkeypatch.syspath_prepend(str(app / "custom"))
    monkeypatch.delitem(sys.modules, "study", raising=False)
    meta = json.loads((stock / job / "meta.json").read_text())
    assert (meta["deploy_map"], meta["min_clients"]) == ({"app": ["@ALL"]}, 3)
    components = 0
    for end in ("server", "client"):
        text = (app / "config" / f"config_fed_{end}.json").read_text()
        components += text.count('"flare_sparse.components.')
        for entry in iterate_entries(json.loads(text)):
            assert isinstance(build(entry), FLComponent)
            assert entry["path"].startswith(("flare_sparse.components.", "nvflare."))
    assert components >= 2
    assert {path.name for path in (app / "custom").iterdir()} >= {"study.py", "client.py"}
    assert not any(path.is_symlink() for path in app.rglob("*"))


def test_stock_jobs_are_those_of_the_five_papers(stock: Path) -> None:
    assert sorted(path.name for path in stock.iterdir()) == sorted(JOBS)


def test_every_public_name_leads_to_a_class_that_a_site_may_allow() -> None:
    paths = {f"{cls.__module__}.{cls.__qualname__}" for cls in (getattr(public, name) for name in public.__all__)}
    assert sorted(paths - set(RECIPE_CLASSES)) == [
        "flare_sparse.components.arrays.ComponentError",
        "flare_sparse.components.decomposers.MaskDecomposer",
        "flare_sparse.components.decomposers.PatchDecomposer",
        "flare_sparse.components.recipes.add_components",
    ]
    assert public.__all__ == sorted(public.__all__)


def list_recipes() -> dict[str, str]:
    """The complete jobs of the page, by name."""
    page = (ROOT / "docs" / "components.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    return {match[1] if (match := re.search(r'name="(\w+)"', block)) else "own": block for block in blocks}


def describe_chains(config: Any) -> list[Any]:
    """Return paths and arguments of a configuration's filters and executors; of those of FLARE the script alone."""
    executors = [(entry["tasks"], describe_entry(entry["executor"])) for entry in config.get("executors", [])]
    chains = [config["task_data_filters"], config["task_result_filters"]]
    rows = [[(row["tasks"], [describe_entry(f) for f in row["filters"]]) for row in chain] for chain in chains]
    return [sorted((sorted(tasks), entry) for tasks, entry in executors), *rows]


def describe_entry(entry: dict[str, Any]) -> Any:
    """Return the class and the arguments that count of an entry, those of FLARE's executor without its defaults."""
    args = entry.get("args", {})
    if entry["path"].startswith("nvflare.app_common.executors."):
        return [entry["path"], args["task_script_path"]]
    own = build(entry)
    named = sorted((n, v) for n, v in list_arguments(own).items() if n not in ("model", "data"))
    return [entry["path"], str(named), str([args.get("model"), args.get("data")])]


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_recipe_of_the_page_is_the_job_written_by_hand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (STOCK / "custom").glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "study", raising=False)
    block = list_recipes()[name]
    assert block.count("recipe.execute(SimEnv(num_clients=3))") == 1
    exec(block.replace("recipe.execute(SimEnv(num_clients=3))", 'recipe.export("jobs")'), {})
    exported, written = tmp_path / "jobs" / name / "app" / "config", STOCK / name / "app" / "config"
    for end in ("server", "client"):
        ours, theirs = (json.loads((f / f"config_fed_{end}.json").read_text()) for f in (written, exported))
        assert describe_chains(ours) == describe_chains(theirs)
        if end == "server":
            controllers = [config["workflows"][0] for config in (ours, theirs)]
            assert controllers[0]["path"] == controllers[1]["path"]
            built = [build(entry) for entry in controllers]
            for attribute in ("num_clients", "num_rounds"):
                assert getattr(built[0], attribute) == getattr(built[1], attribute)
            assert list_arguments(built[0].aggregator) == list_arguments(built[1].aggregator)
            if name in ("neurosfl", "metagater"):
                ours, theirs = map(list_arguments, built)
                assert ours | {"aggregator": None} == theirs | {"aggregator": None}
    monkeypatch.delitem(sys.modules, "study", raising=False)


def test_tracking_of_flare_is_in_the_job_of_either_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(list_recipes()["own"].replace("app_configs/", f"{ROOT}/app_configs/"), {})
    server = json.loads(
        (tmp_path / "jobs" / "scbf_mortality" / "app" / "config" / "config_fed_server.json").read_text()
    )
    (receiver,) = [component for component in server["components"] if component["id"] == "receiver"]
    # What sites log in a script, and what the package's controller logs at the server.
    assert set(build(receiver).events) == {"fed.analytix_log_stats", "analytix_log_stats"}
    assert list_recipes()["fedsparsify"].count('add_experiment_tracking(recipe, "tensorboard")') == 1
