"""Loading of the model of a finished run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from .folder import CONFIG
from ...config.assemble import Assembly, assemble
from ...config.schema import RunConfig
from ...config.loading import load_config
from ...config.user_tasks import load_task
from ...core.errors import ConfigError
from ...training.compute import Compute, can_use_kernels
from .models import read_run_model


def load_model(run: str | Path, *, best: bool = False, compute: Compute = "dense") -> nn.Module:
    """Load the network of a run with its trained weights, in evaluation mode; masked entries are zero.

        >>> from flare_sparse import load_model
        >>> model = load_model("runs/neurosfl_brain_age")  # doctest: +SKIP
        >>> ages = model(volumes)                          # doctest: +SKIP

    Args:
        run: result folder of ``flare-sparse run``.
        best: load the best model on validation examples instead of the last one.
        compute: ``auto`` or ``sparse``: compute with sparse kernels on the CPU, for inference only (docs/compute.md).

    Raises:
        ConfigError: the folder is not a result folder, it has no such model, its model belongs to another network, or
            ``sparse`` is asked for without numba.
    """
    return compile_model(load_trained_model(Path(run), best=best)[0], compute, torch.device("cpu"))


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


def load_assembly(run: Path) -> tuple[Assembly, RunConfig]:
    """Load the assembly and the configuration of a run, without its model.

    Raises:
        ConfigError: the folder is not a result folder.
    """
    file = run / CONFIG
    if not file.is_file():
        raise ConfigError(f"{run}: no config.yaml; expected the result folder of flare-sparse run")
    config = load_config(file)
    return assemble(config, load_task(config, run)), config


def load_trained_model(run: Path, *, best: bool = False) -> tuple[nn.Module, Assembly, RunConfig]:
    """Load the network as :func:`load_model` does, with the assembly and the configuration of the run.

    Raises:
        ConfigError: as :func:`load_model`.
    """
    assembly, config = load_assembly(run)
    return assembly.build_network(read_run_model(run, assembly, "best" if best else "final")), assembly, config
