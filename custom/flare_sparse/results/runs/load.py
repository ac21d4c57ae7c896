"""The models in a result folder: the final one, the best one, and the sites' own; as vectors and as networks."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ...compute import Compute
from ...config.assemble import Assembly
from ...config.study import Study
from ...config.user_code import mark_received
from ...config.user_code import trust_code as trust
from ...core.errors import ConfigError, list_first, suggest
from ...methods.method import describe_site_model, has_common_model
from ...training.compute import can_use_kernels
from .model_files import find_site_models, read_model
from .received import check_links
from .record import CONFIG

FILES = {"final": "model.safetensors", "best": "best_model.safetensors"}


def read_run_model(run: Path, assembly: Assembly, name: str) -> Tensor:
    """Read one model of a run, a vector of ``assembly.network``.

    Tensors that stay at the sites have their initial values in the run's model, and the site's own in a site's model.

    Args:
        run: result folder.
        assembly: parts of the run.
        name: ``final``, ``best``, or the name of a site for the site's own model.

    Raises:
        ConfigError: the run has no such model.
    """
    if name not in FILES:
        site_models = find_site_models(run)
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
    if not file.is_file():
        if name == "best":
            raise ConfigError(f"{file}: the run has no best model; choose final")
        raise ConfigError(
            f"{file}: the run has no model, because it has not ended; an interrupted run continues with the same "
            "flare-sparse run command and --start last"
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
    return [*names, *find_site_models(run)]


def load_model(
    run: str | Path, name: str = "final", *, compute: Compute = "dense", compact: bool = False, trust_code: bool = False
) -> nn.Module:
    """Load the network of a run with its trained weights, in evaluation mode; masked entries are zero.

    Examples:
        >>> import flare_sparse
        >>> _ = flare_sparse.run("study.yaml", out="out", start="new", observer=flare_sparse.Observer())
        >>> load_model("out")(torch.zeros(1, 2)).shape
        torch.Size([1, 1])

    Args:
        run: result folder of ``flare-sparse run``.
        name: ``final``; ``best``, of the round with the best metric on validation examples; or a site, for its own.
        compute: ``auto`` or ``sparse``: compute with sparse kernels on the CPU, for inference only (docs/compute.md).
        compact: cut out the units and channels that are off for every input; the outputs stay the same.
        trust_code: execute the user's code in the folder; a run that this process has made needs no word.

    Raises:
        ConfigError: the folder is not a result folder, it has no such model, its model belongs to another network,
            ``sparse`` is asked for without numba, or ``compact`` where no unit or channel is off.
        UntrustedCode: its settings name code, and it is not trusted.
    """
    model = load_trained_model(load_study(Path(run), trust_code=trust_code), name)
    if compact:
        from ...compute.structure.compact import compact_model

        model = compact_model(model)
    return compile_model(model, compute, torch.device("cpu"))


def compile_model(model: nn.Module, compute: Compute, device: torch.device) -> nn.Module:
    """Return a network for inference on a device, with sparse kernels where ``compute`` and the device allow them.

    Raises:
        ConfigError: ``sparse`` is asked for without numba or on a GPU.
    """
    if not can_use_kernels(compute, device):
        return model.eval().to(device)
    # numba is an optional dependency, which takes a second to import.
    from ...compute.kernels.network import compile_network

    return compile_network(model)


def load_study(run: Path, *, trust_code: bool = False) -> Study:
    """Load the study of a run from its result folder, without the run's model.

    Raises:
        ConfigError: the folder is not a result folder, or leads out of itself.
        UntrustedCode: its settings name code, and it is not trusted.
    """
    check_links(run)
    mark_received(run)
    if trust_code:
        trust(run)
    file = run / CONFIG
    if not file.is_file():
        raise ConfigError(f"{run}: no config.yaml; expected the result folder of flare-sparse run")
    return Study.load(file)


def load_trained_model(study: Study, name: str = "final") -> nn.Module:
    """Return the network of a finished run in evaluation mode.

    Args:
        study: of :func:`load_study`.
        name: which of the run's models, as :func:`read_run_model` accepts it.

    Raises:
        ConfigError: as :func:`load_model`.
    """
    return study.assembly.build_network(read_run_model(study.folder, study.assembly, name))
