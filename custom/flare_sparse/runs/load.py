"""The model of a finished run, ready to use."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from ..assemble import Assembly, assemble
from ..config import RunConfig, load_config, load_task
from ..errors import ConfigError
from .model_files import read_model as load_vector


def load_model(run: str | Path, *, best: bool = False) -> nn.Module:
    """The network of a run with its weights, in evaluation mode; what is masked is zero.

        >>> from flare_sparse import load_model
        >>> model = load_model("runs/neurosfl_brain_age")  # doctest: +SKIP
        >>> ages = model(volumes)                          # doctest: +SKIP

    Args:
        run: result folder of ``flare-sparse run`` or ``rehearse``.
        best: the best model by the task's metric, not the last.

    Raises:
        ConfigError: it is no result folder, or its model is of another network.
    """
    return load_trained(Path(run), best=best)[0]


def load_assembly(run: Path) -> tuple[Assembly, RunConfig]:
    """The parts and the configuration of a run, without its model.

    Raises:
        ConfigError: it is no result folder.
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run}: no config.yaml; expected the result folder of flare-sparse run or rehearse")
    config = load_config(file)
    return assemble(config, load_task(config, run)), config


def load_trained(run: Path, *, best: bool = False) -> tuple[nn.Module, Assembly, RunConfig]:
    """As :func:`load_model`, with the parts and the configuration of the run.

    Raises:
        ConfigError: as :func:`load_model`.
    """
    assembly, config = load_assembly(run)
    weights = load_vector(run / ("best_model.safetensors" if best else "model.safetensors"), assembly.layout)
    model = assembly.task.model()
    model.load_state_dict(assembly.layout.unflatten(weights), strict=False)
    return model.eval(), assembly, config
