"""A study as a FLARE job, and what its section ``deployment`` needs where it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..config.schema import Service
    from ..config.study import Study
    from ..core.observer import Observer
    from ..flare.recipe import SparseRecipe
    from ..flare.tracking import Tracker

Env = Literal["local", "sim", "poc", "prod"]


def build_recipe(study: Study, folder: Path) -> SparseRecipe:
    """Return the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe

    config, track = study.config, study.config.deployment.track
    if study.user_code:
        config = config.model_copy(update={"deployment": config.deployment.model_copy(update={"packaging": "byoc"})})
    recipe = SparseRecipe(
        config,
        modules=study.user_code,
        tracker=build_tracker(track, study, folder) if track in ("mlflow", "wandb") else None,
    )
    if track == "tensorboard":
        from ..flare.tracking import track_in_tensorboard

        track_in_tensorboard(recipe)
    return recipe


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
    # The lead builds FLARE's receiver of TensorBoard, and the server the others.
    elif (env != "prod" or service == "tensorboard") and importlib.util.find_spec(service) is None:
        raise ConfigError(f"deployment.track: {service} needs its package: pip install 'flare-sparse[track]'")


def build_tracker(service: Service, study: Study, out: Path) -> Tracker:
    """Return the component that sends a run's figures to MLflow or Weights & Biases.

    Args:
        service: one of them.
        study: the run; its name is the experiment.
        out: result folder; its name is the name of the run.
    """
    from ..flare.tracking import Tracker

    config = study.config
    tags = {"method": config.method.name, "task": config.task.name, "seed": str(config.seed)}
    return Tracker(service, config.name, out.resolve().name, tags)
