"""Components in a recipe of FLARE, which has no function that adds a filter to several chains in their order."""

from collections.abc import Sequence

from nvflare.apis.filter import Filter
from nvflare.app_common.ccwf.common import Constant, make_task_name
from nvflare.app_common.ccwf.swarm_server_ctl import SwarmServerController
from nvflare.recipe.spec import Recipe

from ..core.errors import ConfigError
from .sparse_exchange import SparseExchange

# By name: FLARE's package for XGBoost cannot be imported without it.
_NO_ARRAYS = {"JoblibModelParamPersistor", "XGBModelPersistor"}
"""Classes that keep the models of scikit-learn's recipes (linear, KMeans, SVM) and of XGBoost's, at the server."""
_SWARM_TASKS = {Constant.BASENAME_LEARN: "model", Constant.BASENAME_REPORT_LEARN_RESULT: "update"}


def add_components(
    recipe: Recipe,
    *,
    exchange: SparseExchange | None = None,
    client_output: Sequence[Filter] = (),
    server_input: Sequence[Filter] = (),
    server_output: Sequence[Filter] = (),
    client_input: Sequence[Filter] = (),
    tasks: Sequence[str] = ("train",),
) -> None:
    """Add filters to a recipe, which then relies on this package at all ends instead of copying parts of it.

    Args:
        recipe: a recipe of FLARE; call this after all other filters were added.
        exchange: filter of all four chains: the last one where messages leave, the first one where they arrive. In the
            swarm recipe it is on the messages between sites.
        client_output: filters of what leaves a site, in their order.
        server_input: filters of what arrives at the server.
        server_output: filters of the models that leave the server.
        client_input: filters of the models that arrive at a site.
        tasks: names of the tasks; those that carry models.

    Raises:
        ConfigError: the exchange cannot serve the recipe; the text says why.
    """
    if exchange is not None:
        _check_exchange(recipe)
    workflows = [entry.controller for entry in recipe._job._deploy_map["server"].app_config.workflows]
    is_swarm = any(isinstance(controller, SwarmServerController) for controller in workflows)
    if exchange is not None and is_swarm:
        _add_to_swarm(recipe, exchange)
    shared = [] if exchange is None or is_swarm else [exchange]
    for add, filters in (
        (recipe.add_client_output_filter, [*client_output, *shared]),
        (recipe.add_server_input_filter, [*shared, *server_input]),
        (recipe.add_server_output_filter, [*server_output, *shared]),
        (recipe.add_client_input_filter, [*shared, *client_input]),
    ):
        for item in filters:
            add(item, tasks=list(tasks))
    require_package(recipe)


def require_package(recipe: Recipe) -> None:
    """Let a recipe rely on this package at all ends.

    Otherwise FLARE copies those modules of the package that it finds by tracing imports, which misses some.
    """
    # FLARE 2.9 has no public function that returns the job of a recipe.
    recipe._job.set_app_packages(["flare_sparse"])


def _check_exchange(recipe: Recipe) -> None:
    """Refuse a recipe whose messages have no arrays of numbers where the filter would see them.

    Raises:
        ConfigError: they have none.
    """
    apps = [app.app_config for app in recipe._job._deploy_map.values()]
    chains = [chain for app in apps for chain in (*app.task_data_filters, *app.task_result_filters)]
    filters = {type(item).__name__ for _, row in chains for item in row}
    kept = sorted(_NO_ARRAYS & {type(part).__name__ for app in apps for part in app.components.values()})
    problem = ""
    if kept:
        problem = f"its models are no arrays of numbers ({kept[0]} keeps parameters or trees)"
    elif any(name.startswith("HE") for name in filters):
        problem = "its updates are encrypted, and a selection cannot be made from ciphertext"
    elif getattr(recipe, "_tensor_streaming_added", False):
        problem = "tensor streaming takes the tensors out of the messages before any filter"
    if problem:
        raise ConfigError(f"{type(recipe).__name__}: {problem}; leave out one of the two")


def _add_to_swarm(recipe: Recipe, exchange: SparseExchange) -> None:
    """Add the filter to the messages between sites, in both directions, which recipes have no function for."""
    path = f"{SparseExchange.__module__}.{SparseExchange.__qualname__}"
    settings = {name: getattr(exchange, name) for name in ("keep", "values", "error_feedback", "mask")}
    chains = [
        {
            "tasks": [make_task_name(Constant.TN_PREFIX_SWARM, task)],
            "direction": "inout",
            "filters": [{"path": path, "args": {**settings, "content": content}}],
        }
        for task, content in _SWARM_TASKS.items()
    ]
    recipe._ensure_client_apps_prepared()
    recipe.add_client_config({"task_data_filters": chains})
