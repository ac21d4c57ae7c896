"""Loading of the model of a finished run."""

from pathlib import Path

import torch
from torch import nn

from ...compute import Compute
from ...config.study import Study
from ...config.user_code import mark_received
from ...config.user_code import trust_code as trust
from ...core.errors import ConfigError
from ...training.compute import can_use_kernels
from .models import read_run_model
from .record import CONFIG


def load_model(
    run: str | Path,
    name: str = "final",
    *,
    compute: Compute = "dense",
    compact: bool = False,
    trust_code: bool = False,
) -> nn.Module:
    """Load the network of a run with its trained weights, in evaluation mode; masked entries are zero.

    Examples:
        >>> import flare_sparse
        >>> _ = flare_sparse.run("study.yaml", out="out", overwrite=True, observer=flare_sparse.Observer())
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
        ConfigError: the folder is not a result folder.
        UntrustedCode: its settings name code, and it is not trusted.
    """
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
