"""The models in a result folder: the final one, the best one, and the sites' own."""

from pathlib import Path

from torch import Tensor

from ...config.assemble import Assembly
from ...core.errors import ConfigError, list_first, suggest
from ...methods.method import describe_site_model, has_common_model
from .model_files import ENCRYPTED, list_site_models, read_model

FILES = {"final": "model.safetensors", "best": "best_model.safetensors"}


def read_run_model(run: Path, assembly: Assembly, name: str) -> Tensor:
    """Read one model of a run, a vector of ``assembly.network``.

    Tensors that stay at the sites have their initial values in the run's model, and the site's own in a site's model.

    Args:
        run: result folder.
        assembly: parts of the run.
        name: ``final``, ``best``, or the name of a site for the site's own model.

    Raises:
        ConfigError: the run has no such model, or it is encrypted.
    """
    if name not in FILES:
        site_models = list_site_models(run)
        if name not in site_models:
            existing = f"The sites with one are {', '.join(site_models)}" if site_models else f"{run} holds none"
            raise ConfigError(
                f"{run}: there is no own model of site {name!r}.{suggest(name, site_models)} {existing}; only runs "
                "with --env local and sim of a method with personal models keep them"
            )
        return read_model(site_models[name], assembly.network)
    if not has_common_model(assembly.method.config):
        raise ConfigError(
            f"{run}: {assembly.method.name} trains no common model: each site's model is "
            f"{describe_site_model(assembly.method.config)}. flare-sparse evaluate and predict use a site's model with "
            "--model SITE; evaluate without --data evaluates every site's model at every other site"
        )
    file = run / FILES[name]
    if not file.is_file() and not (run / f"{ENCRYPTED}{file.name}").is_file():
        if name == "best":
            raise ConfigError(f"{file}: the run has no best model; choose final")
        raise ConfigError(
            f"{file}: the run has no model, because it has not ended; an interrupted run continues with the same "
            "flare-sparse run command and --resume"
        )
    return assembly.complete(read_model(file, assembly.layout))


def describe_missing(assembly: Assembly, name: str) -> str:
    """Return which tensors a model of a run lacks because they stay at the sites; empty if it has all."""
    if name not in FILES or not assembly.personal:
        return ""
    return (
        f"note: {list_first(assembly.personal, 3)} stay at the sites and have their initial values in this model; "
        "--model SITE takes a site's own model"
    )


def list_run_models(run: Path, assembly: Assembly) -> list[str]:
    """Return the names of the models in a result folder, as :func:`read_run_model` accepts them."""
    names = [
        name for name, file in FILES.items() if has_common_model(assembly.method.config) and (run / file).is_file()
    ]
    return [*names, *list_site_models(run)]
