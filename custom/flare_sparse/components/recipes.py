"""Components in a recipe of FLARE, which has no function that adds a filter to several chains in their order."""

from collections.abc import Sequence
from typing import Any

from nvflare.apis.filter import Filter
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe


def add_components(
    recipe: Recipe,
    *,
    client_output: Sequence[Filter] = (),
    server_input: Sequence[Filter] = (),
    server_output: Sequence[Filter] = (),
    client_input: Sequence[Filter] = (),
    tasks: Sequence[str] = ("train",),
) -> None:
    """Add filters to a recipe, which then relies on this package at all ends instead of copying parts of it.

    Args:
        recipe: a recipe of FLARE; call this after all other filters were added.
        client_output: filters of what leaves a site, in their order.
        server_input: filters of what arrives at the server.
        server_output: filters of the models that leave the server.
        client_input: filters of the models that arrive at a site.
        tasks: names of the tasks; those that carry models.
    """
    for add, filters in (
        (recipe.add_client_output_filter, client_output),
        (recipe.add_server_input_filter, server_input),
        (recipe.add_server_output_filter, server_output),
        (recipe.add_client_input_filter, client_input),
    ):
        for item in filters:
            add(item, tasks=list(tasks))
    require_package(recipe)


def require_package(recipe: Recipe) -> None:
    """Let a recipe rely on this package at all ends.

    Otherwise FLARE copies those modules of the package that it finds by tracing imports, which misses some.
    """
    get_job(recipe).set_app_packages(["flare_sparse"])


def get_apps(recipe: Recipe) -> dict[str, Any]:
    """Return the apps of a recipe's job by where they run: ``"server"``, else a site or all of them."""
    apps: dict[str, Any] = get_job(recipe)._deploy_map
    return apps


def get_job(recipe: Recipe) -> FedJob:
    """Return the job that a recipe builds: FLARE 2.9 has no public function that does."""
    return recipe._job
