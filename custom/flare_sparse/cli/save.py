"""``flare-sparse save``: write a run's model in a format that other libraries read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from torch import Tensor
from torch.utils.data import DataLoader

from ..assemble import Assembly
from ..config import RunConfig
from ..errors import ConfigError
from ..runs.load import load_trained_model
from ..task import SiteData, load_examples
from .console import out as console
from .sites import prepare_site_data


def save(
    run: Annotated[Path, typer.Argument(help="Result folder of a run", show_default=False)],
    to: Annotated[Path | None, typer.Option(help="Folder to write; default: saved/ in the result folder")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Save the best model by the task's metric instead of the last one")
    ] = False,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write ONNX, too, after a check that it computes the same on the run's data")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Data for the check of --onnx; default: that of the run's first simulated site")
    ] = None,
) -> None:
    """Write a run's model as other libraries read it: adapters in the format of peft, networks as safetensors.

    A folder in $FLARE_SPARSE_MODELS can serve other tasks as their base model, by the folder's name.

    [dim]flare-sparse save runs/lora_a2_brain_age --to adapters/nsk[/]

    [dim]flare-sparse save runs/neurosfl_brain_age --onnx[/]
    """
    model, assembly, config = load_trained_model(run, best=best)
    folder = to or run / "saved"
    assembly.task.save(model, folder)
    if onnx:
        try:
            from ..runs.onnx_export import export_onnx
        except ImportError as error:
            raise ConfigError(
                f"--onnx needs onnx and onnxruntime: pip install 'flare-sparse[onnx]' ({error.name})"
            ) from error
        largest_error = export_onnx(model.eval(), _load_inputs(config, assembly, run, data), folder / "model.onnx")
        console.print(f"model.onnx computes the same within {largest_error:.2g}")
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())), markup=False)


def _load_inputs(config: RunConfig, assembly: Assembly, run: Path, data: Path | None) -> Tensor:
    """Return inputs of four test examples, of the given data or else of the first simulated site.

    Raises:
        ConfigError: the network takes more than one tensor, or there is no data.
    """
    if data is None and config.simulator is None:
        raise ConfigError("--onnx: the run has no simulator section and so no data for the check; add --data DIR")
    if data is not None:
        site = SiteData("data", data.resolve())
    else:
        site = next(iter(prepare_site_data(config, assembly.task, run).values()))
    batch = next(iter(DataLoader(load_examples(assembly.task, site, config.seed).test, batch_size=4)))
    inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
    if not isinstance(inputs, Tensor):
        raise ConfigError(f"--onnx: expected a network whose input is one tensor, found {type(inputs).__name__}")
    return inputs
