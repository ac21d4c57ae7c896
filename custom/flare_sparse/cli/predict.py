"""``flare-sparse predict``: write a run's predictions for images at hand."""

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import ConfigError
from .console import out as console
from .options import ModelName, Out


def predict(
    run: Annotated[Path, typer.Argument(help="Result folder of a finished run")],
    data: Annotated[
        Path,
        typer.Argument(help="A data set in the form of the run's sites, a folder of images, or one image"),
    ],
    out: Out = None,
    model: ModelName = "final",
) -> None:
    """Write a label map for every image with the model of a segmentation run; no labels are needed.

    The folder --out must be new or empty; without it, it is RUN/predictions/NAME, with the name of the data. Each file
    OUT/CASE_dseg.nii.gz has orientation, affine and voxels of the image and the values of task.classes.
    Nothing leaves this machine.

    [dim]flare-sparse predict runs/neurosfl_hippocampus /data/new_hospital --out predictions[/]
    """
    from ..config.withdrawals import open_data
    from ..core.seeds import limit_threads
    from ..results.runs.load import compile_model, describe_missing, load_study, load_trained_model

    study, name = load_study(run), data.resolve().name.split(".")[0]
    site, out = open_data(run, data, name), out or run / "predictions" / name
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out {out}: is not empty; choose another folder, or remove it first")
    assembly = study.assembly
    device = assembly.method.config.training.select_hardware().device
    network = load_trained_model(study, model)
    if note := describe_missing(assembly, model):
        console.print(note)
    network = compile_model(network, "auto", device)
    with limit_threads(study.config.federation.threads):
        files = list(assembly.task.write_predictions(network, site, out))
    gone = f"; {len(site.withdrawn)} withdrawn subjects are left out" if site.withdrawn else ""
    console.print(f"{out}: {len(files)} predictions{gone}")
