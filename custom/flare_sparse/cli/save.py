"""``flare-sparse save``: a run's model in the form that others open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor
from torch.utils.data import DataLoader

from ..assemble import Assembly
from ..config import RunConfig
from ..errors import ConfigError
from ..runs.load import load_trained
from ..task import SiteData
from .console import out as console
from .sites import simulated_sites


def save(
    run: Annotated[Path, typer.Argument(help="result folder of a run")],
    to: Annotated[Path | None, typer.Option(help="folder to write; default: saved/ in the result folder")] = None,
    best: Annotated[bool, typer.Option("--best", help="the best model by the task's metric, not the last")] = False,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="also as ONNX, after a check that it computes the same on the run's own data")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="--onnx: data to check with; default: that of the run's first simulated site")
    ] = None,
) -> None:
    """Write a run's model as its own library reads it: adapters as peft does, a network as model.safetensors.

    A folder written into $FLARE_SPARSE_MODELS is a base for other tasks, by its name.

    [dim]flare-sparse save runs/lora_a2_brain_age --to adapters/nsk[/]

    [dim]flare-sparse save runs/neurosfl_brain_age --onnx[/]
    """
    model, assembly, config = load_trained(run, best=best)
    folder = to or run / "saved"
    assembly.task.save(model, folder)
    if onnx:
        try:
            from ..runs.onnx_export import export_onnx
        except ImportError as error:
            raise ConfigError(
                f"--onnx needs onnx and onnxruntime: pip install 'flare-sparse[onnx]' ({error.name})"
            ) from error
        furthest = export_onnx(model.eval(), _inputs(config, assembly, run, data), folder / "model.onnx")
        console.print(f"model.onnx computes the same: the largest difference is {furthest:.2g}")
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())), markup=False)


def _inputs(config: RunConfig, assembly: Assembly, run: Path, data: Path | None) -> Tensor:
    """Some test examples, as the network sees them: of the given data, else of the first simulated site.

    Raises:
        ConfigError: the network takes more than one tensor, or there is neither.
    """
    if data is None and config.simulator is None:
        raise ConfigError("--onnx: this run names no data (it has no simulator section); give some with --data DIR")
    if data is not None:
        site = SiteData("data", data.resolve())
    else:
        site = next(iter(simulated_sites(config, assembly.task, run).values()))
    batch = next(iter(DataLoader(assembly.task.load(site, config.seed).test, batch_size=4)))
    inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
    if not isinstance(inputs, Tensor):
        raise ConfigError(f"--onnx: a network of one tensor is wanted, this one takes {type(inputs).__name__}")
    return inputs
