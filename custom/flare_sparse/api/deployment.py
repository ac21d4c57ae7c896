"""A study as a FLARE job."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import Service
    from ..config.study import Study
    from ..core.observer import Observer
    from ..flare.recipe import SparseRecipe

Env = Literal["local", "sim", "poc", "prod"]


def build_recipe(study: Study, out: Path) -> SparseRecipe:
    """Return the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe
    from ..flare.tracking import Tracker

    config = study.config
    if study.user_code:
        config = config.model_copy(update={"deployment": config.deployment.model_copy(update={"packaging": "byoc"})})
    tracker = None
    if (service := config.deployment.track) is not None:
        tags = {"method": config.method.name, "task": config.task.name, "seed": str(config.seed)}
        tracker = Tracker(service, config.name, out.resolve().name, tags)
    return SparseRecipe(config, modules=study.user_code, tracker=tracker)


def describe_start(study: Study, environment: str) -> str:
    """Return the line of text that says what starts where."""
    method = study.config.method
    return f"{study.config.name}: {method.name}, {method.config.rounds} rounds, {environment}"


def check_service(service: Service | None, env: str, observer: Observer) -> None:
    """Refuse a tracking service whose package is missing, and say where one receives nothing.

    Raises:
        ConfigError: the service's package is missing where it runs.
    """
    if service is None:
        return
    if env == "local":
        observer.note("deployment.track: a local run has no FLARE server that could send figures; --env sim has one")
    elif env != "prod" and find_spec(service) is None:
        raise ConfigError(f"deployment.track: {service} needs its package: pip install 'flare-sparse[track]'")
