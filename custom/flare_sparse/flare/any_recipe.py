"""Sparse messages in any FLARE recipe: one call adds the filters to its job."""

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvflare.app_common.ccwf.common import Constant, make_task_name
from nvflare.app_common.ccwf.swarm_server_ctl import SwarmServerController
from nvflare.app_common.workflows.base_model_controller import BaseModelController
from nvflare.app_common.workflows.cyclic_ctl import CyclicController
from nvflare.app_common.workflows.scatter_and_gather import ScatterAndGather
from nvflare.app_opt.pt.recipes.fedeval import EvalController
from nvflare.recipe.spec import Recipe

import flare_sparse

from ..components.recipes import get_apps, require_package
from ..components.sparse_exchange import SparseExchange, describe_filter
from ..config.schema import Packaging
from ..core.errors import ConfigError
from ..wire.formats import ValueType
from .recipe import check_packaging

_CONTROLLERS = (BaseModelController, ScatterAndGather, CyclicController)
# By name: FLARE's package for XGBoost cannot be imported without it.
_NO_ARRAYS = {"JoblibModelParamPersistor", "XGBModelPersistor"}
"""Classes that keep the models of scikit-learn's recipes (linear, KMeans, SVM) and of XGBoost's, at the server."""
_SWARM_TASKS = {Constant.BASENAME_LEARN: "model", Constant.BASENAME_REPORT_LEARN_RESULT: "update"}


def add_sparse_exchange(
    recipe: Recipe,
    *,
    keep: float = 1.0,
    mask: Sequence[str] | None = None,
    values: ValueType = "float32",
    error_feedback: bool = True,
    tasks: Sequence[str] = ("train",),
    packaging: Packaging = "installed",
) -> None:
    """Send the models and updates of a FLARE recipe as messages of this package.

        recipe = FedAvgRecipe(...)
        add_sparse_exchange(recipe, keep=0.1)
        recipe.execute(SimEnv(num_clients=2))

    Call it after all other filters were added. Metrics, integers and every other part of a message travel as before.

    Args:
        recipe: a recipe whose server sends models to sites in a task, such as FedAvg, FedOpt, FedProx, SCAFFOLD or
            cyclic, or the swarm recipe. In the latter models travel whole, because FLARE sends one message to all
            sites; ``keep`` applies to updates.
        keep: share of the entries in a message, in (0, 1].
        mask: patterns of array names, such as ``["head.*"]``: only arrays that match one travel. None: all arrays.
        values: number format, one of :data:`~flare_sparse.wire.formats.ValueType`.
        error_feedback: whether a site adds what it did not send to its next update.
        tasks: names of the tasks that carry models; not used in the swarm recipe. A process that codes no message
            warns of it at the end of the run, and names the tasks that it saw.
        packaging: ``"installed"``: every site has installed this package; ``"byoc"``: its source travels with the job.

    Raises:
        ConfigError: a setting is invalid, or the recipe cannot be served; the text says why.
    """
    check_packaging(packaging)
    names = [tasks] if isinstance(tasks, str) else list(tasks)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"tasks: expected names of FLARE tasks, such as ['train'], found {tasks!r}")
    patterns = None if mask is None else [mask] if isinstance(mask, str) else list(mask)
    settings: dict[str, Any] = {
        "keep": keep, "values": values, "error_feedback": error_feedback, "mask": patterns,
    }  # fmt: skip
    exchange = SparseExchange(**settings)
    controllers = _list_controllers(recipe)
    _check_recipe(recipe)
    if any(isinstance(controller, SwarmServerController) for controller in controllers):
        _add_swarm_filters(recipe, settings)
    elif any(isinstance(entry, _CONTROLLERS) and not isinstance(entry, EvalController) for entry in controllers):
        _add_filters(recipe, exchange, names)
    else:
        types = ", ".join(type(controller).__name__ for controller in controllers)
        raise ConfigError(
            f"{type(recipe).__name__}: its server sends no model that sites train ({types}); a sparse exchange needs a "
            "recipe such as FedAvg, FedOpt, FedProx, SCAFFOLD, cyclic or swarm"
        )
    _set_packaging(recipe, packaging)


def _set_packaging(recipe: Recipe, packaging: Packaging) -> None:
    if packaging == "byoc":
        _add_package(recipe)
    require_package(recipe)


def _list_controllers(recipe: Recipe) -> list[Any]:
    return [entry.controller for entry in get_apps(recipe)["server"].app_config.workflows]


def _check_recipe(recipe: Recipe) -> None:
    name = type(recipe).__name__
    for app in (app.app_config for app in get_apps(recipe).values()):
        filters = [
            entry for chain in (app.task_data_filters, app.task_result_filters) for _, row in chain for entry in row
        ]
        if any(isinstance(entry, SparseExchange) for entry in filters):
            raise ConfigError(f"{name}: add_sparse_exchange was called before; call it once")
        if stored := next((part for part in app.components.values() if type(part).__name__ in _NO_ARRAYS), None):
            raise ConfigError(
                f"{name}: its models are no arrays of numbers ({type(stored).__name__} keeps parameters or trees), of "
                "which a selection could be sent; run it without add_sparse_exchange, or use a recipe of a network"
            )
        if any(type(entry).__name__.startswith("HE") for entry in filters):
            raise ConfigError(
                f"{name}: its updates are encrypted, and a selection cannot be made from ciphertext; use "
                "wire.aggregation: masked of this package's own methods, or a recipe without encryption"
            )
    if getattr(recipe, "_tensor_streaming_added", False):
        raise ConfigError(
            f"{name}: tensor streaming takes the tensors out of the messages before any filter; leave out "
            "enable_tensor_streaming()"
        )


def _add_filters(recipe: Recipe, exchange: SparseExchange, tasks: list[str]) -> None:
    """Add the filter behind all filters of what leaves a process, and before all filters of what arrives."""
    recipe.add_server_output_filter(exchange, tasks=tasks)
    recipe.add_client_output_filter(exchange, tasks=tasks)
    recipe.add_client_input_filter(exchange, tasks=tasks)
    recipe.add_server_input_filter(exchange, tasks=tasks)
    for target, app in get_apps(recipe).items():
        config = app.app_config
        for _, row in config.task_result_filters if target == "server" else config.task_data_filters:
            if row[-1] is exchange:
                row.insert(0, row.pop())


def _add_swarm_filters(recipe: Recipe, settings: dict[str, Any]) -> None:
    """Add the filter to the messages between sites, in both directions, which recipes have no function for."""
    recipe._ensure_client_apps_prepared()
    clients = [app.app_config for target, app in get_apps(recipe).items() if target != "server"]
    if any(config.task_data_filters for config in clients):
        raise ConfigError(
            f"{type(recipe).__name__}: it has task data filters already, which would be lost; write the filters into "
            "config_fed_client.json by hand"
        )
    chains = [
        describe_filter(settings, [make_task_name(Constant.TN_PREFIX_SWARM, task)], content)
        for task, content in _SWARM_TASKS.items()
    ]
    recipe.add_client_config({"task_data_filters": chains})


def _add_package(recipe: Recipe) -> None:
    """Copy this package into the ``custom/`` folders of the job."""
    staging = Path(tempfile.mkdtemp(prefix="flare-sparse-"))
    # FLARE copies added files only at export or submission, so they must exist as long as the recipe.
    weakref.finalize(recipe, shutil.rmtree, staging, ignore_errors=True)
    copy = staging / "flare_sparse"
    shutil.copytree(Path(flare_sparse.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    for app in get_apps(recipe).values():
        app.app_config.add_file_source(str(copy), dest_dir="flare_sparse", app_folder_type="custom")
