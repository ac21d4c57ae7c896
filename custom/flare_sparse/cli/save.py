"""``flare-sparse save``: write a run's model in a format that other libraries read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import ConfigError
from .console import out as console


def save(
    run: Annotated[Path, typer.Argument(help="Result folder of a run", show_default=False)],
    to: Annotated[Path | None, typer.Option(help="Folder to write; default: saved/ in the result folder")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Save the best model on validation examples instead of the last one")
    ] = False,
    site_model: Annotated[
        str | None, typer.Option(metavar="SITE", help="Save a site's own model instead (of method.personal, for one)")
    ] = None,
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
    from ..results.runs.load import load_study, load_trained_model
    from ..results.runs.models import describe_missing, name_model
    from .inputs import load_inputs

    name = name_model(best=best, site_model=site_model)
    study = load_study(run)
    model = load_trained_model(study, name)
    if note := describe_missing(study.assembly, name):
        console.print(note, markup=False)
    folder = to or run / "saved"
    study.assembly.task.save(model, folder)
    if onnx:
        try:
            from ..results.runs.onnx_export import export_onnx
        except ImportError as error:
            raise ConfigError(
                f"--onnx needs onnx and onnxruntime: pip install 'flare-sparse[onnx]' ({error.name})"
            ) from error
        largest_error = export_onnx(model, load_inputs("--onnx", study, data), folder / "model.onnx")
        console.print(f"model.onnx computes the same within {largest_error:.2g}")
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())), markup=False)
