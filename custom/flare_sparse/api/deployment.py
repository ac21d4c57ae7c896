"""What the environments of FLARE need to know beside the study."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..config.study import Study
    from ..flare.recipe import SparseRecipe
    from ..flare.tracking import Tracker

Env = Literal["local", "sim", "poc", "prod"]
Service = Literal["tensorboard", "mlflow", "wandb"]
"""Where a run's figures can be sent to, through FLARE's receivers."""


@dataclass(frozen=True)
class Deployment:
    """How a job is sent to FLARE.

    Attributes:
        kit: startup kit of an admin who may submit jobs; only for ``prod``, which needs one.
        byoc: send the package's source with the job.
        track: service that receives the figures of every round; None: none.
        restart_command: command that submits the job again, for the user; empty: unknown.

    Examples:
        >>> from pathlib import Path
        >>> Deployment(kit=Path("kits/lead"), byoc=True).kit.name
        'lead'
    """

    kit: Path | None = None
    byoc: bool = False
    track: Service | None = None
    restart_command: str = ""


UNSPECIFIED = Deployment()


def build_recipe(study: Study, folder: Path, deployment: Deployment) -> SparseRecipe:
    """Return the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe

    track = deployment.track
    recipe = SparseRecipe(
        study.config,
        packaging="byoc" if study.user_code or deployment.byoc else "installed",
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


def check_service(service: Service, env: Env) -> None:
    """Refuse a tracking service that would receive nothing.

    Raises:
        ConfigError: the run has no FLARE server, or the service's package is missing where it runs.
    """
    if env == "local":
        raise ConfigError("--track: a local run has no FLARE server that could send figures; use --env sim")
    # The lead builds FLARE's receiver of TensorBoard, and the server the others.
    if (env != "prod" or service == "tensorboard") and importlib.util.find_spec(service) is None:
        raise ConfigError(f"--track {service} needs its package: pip install 'flare-sparse[track]'")


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
