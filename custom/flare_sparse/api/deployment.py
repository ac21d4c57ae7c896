"""What the environments of FLARE need to know beside the study."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from ..core.errors import ConfigError

if TYPE_CHECKING:
    from ..config.study import Study
    from ..flare.recipe import SparseRecipe
    from ..flare.tracking import MlflowTracker

Env = Literal["local", "sim", "poc", "prod"]
EXPERIMENT_VARIABLE = "MLFLOW_EXPERIMENT_NAME"
"""MLflow's own variable for the name of the experiment."""
SQLITE = "sqlite:///"


@dataclass(frozen=True)
class Deployment:
    """How a job is sent to FLARE.

    Attributes:
        kit: startup kit of an admin who may submit jobs; only for ``prod``, which needs one.
        byoc: send the package's source with the job.
        mlflow: tracking URI, resolved; None: no tracking.
        restart_command: command that submits the job again, for the user; empty: unknown.

    Examples:
        >>> from pathlib import Path
        >>> Deployment(kit=Path("kits/lead"), byoc=True).kit.name
        'lead'
    """

    kit: Path | None = None
    byoc: bool = False
    mlflow: str | None = None
    restart_command: str = ""


UNSPECIFIED = Deployment()


def build_recipe(study: Study, folder: Path, deployment: Deployment) -> SparseRecipe:
    """Return the job; a user task travels as code, and then the package's source travels, too."""
    from ..flare.recipe import SparseRecipe

    return SparseRecipe(
        study.config,
        packaging="byoc" if study.user_code or deployment.byoc else "installed",
        modules=study.user_code,
        tracker=build_tracker(deployment.mlflow, study, folder),
    )


def describe_start(study: Study, environment: str) -> str:
    """Return the line of text that says what starts where."""
    method = study.config.method
    return f"{study.config.name}: {method.name}, {method.config.rounds} rounds, {environment}"


def resolve_tracking_uri(uri: str, env: Env) -> str:
    """Return a tracking URI that means the same in every working folder; a path becomes absolute.

    Args:
        uri: an address, a database, or the path of a folder, with or without ``file:``.
        env: where the job runs.

    Raises:
        ConfigError: the run has no FLARE server, MLflow is not installed, the URI holds a password, or is a relative
            path on another host.
    """
    if env == "local":
        raise ConfigError("--mlflow: a local run has no FLARE server that could send figures; use --env sim")
    if env != "prod" and importlib.util.find_spec("mlflow") is None:
        raise ConfigError("--mlflow needs MLflow: pip install 'flare-sparse[mlflow]'")
    parts = urlsplit(uri)
    if parts.username or parts.password:
        raise ConfigError(
            "--mlflow: leave user and password out of the URI, because the job carries it to every site; set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD at the server instead"
        )
    if uri.startswith(SQLITE):
        prefix, path = SQLITE, uri.removeprefix(SQLITE)
    elif parts.scheme in {"", "file"}:
        prefix, path = "file://", parts.path
    else:
        return uri
    if not path or (env == "prod" and not path.startswith("/")):
        raise ConfigError(f"--mlflow {uri}: give the address of an MLflow server, such as https://mlflow.our.org")
    return prefix + str(Path(path).absolute())


def build_tracker(uri: str | None, study: Study, out: Path) -> MlflowTracker | None:
    """Return the component that sends a run's figures to MLflow; None without a URI.

    Args:
        uri: tracking URI, resolved.
        study: the run; its name is the experiment unless ``MLFLOW_EXPERIMENT_NAME`` names another.
        out: result folder; its name is the name of the run.
    """
    if uri is None:
        return None
    from ..flare.tracking import MlflowTracker

    config = study.config
    return MlflowTracker(
        tracking_uri=uri,
        experiment_name=os.environ.get(EXPERIMENT_VARIABLE) or config.name,
        run_name=out.resolve().name,
        run_tags={"method": config.method.name, "task": config.task.name, "seed": str(config.seed)},
    )
