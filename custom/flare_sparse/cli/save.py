"""``flare-sparse save``: write a run's model in a format that other libraries read."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..core.errors import ConfigError
from .console import Screen
from .console import out as console
from .options import ModelName, Out

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..config.study import Study

_INPUTS = 4
"""Examples on which the ONNX file is compared with the network."""
Format = Literal["network", "sparse", "int8", "csr", "compact", "onnx"]


def save(
    run: Annotated[Path, typer.Argument(help="Result folder of a run")],
    out: Out = None,
    model: ModelName = "final",
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="network: as other libraries read it; sparse: the smallest folder that load_model reads; int8: the "
            "same with values of 8 bits, which changes predictions a little; csr: each tensor as a sparse matrix of "
            "scipy; compact: without the units and channels that compute nothing; onnx: a file, without these, too, "
            "after a check that it computes the same",
        ),
    ] = "network",
    data: Annotated[
        Path | None, typer.Option(help="Data for the check of onnx; default: that of the run's first simulated site")
    ] = None,
) -> None:
    """Write a run's model as other libraries read it: adapters in the format of peft, networks as safetensors.

    They go to the folder --out, or else to saved/ in the result folder. A folder in $FLARE_SPARSE_MODELS can
    serve other tasks as their base model, by the folder's name.

    [dim]flare-sparse save runs/lora_a2_brain_age --out adapters/nsk[/]

    [dim]flare-sparse save runs/neurosfl_brain_age --format onnx[/]

    [dim]flare-sparse save runs/neurosfl_brain_age --format sparse[/]
    """
    from ..compute.structure.compact import compact_model
    from ..results.runs.exports import save_csr, save_small_run
    from ..results.runs.load import describe_missing, load_study, load_trained_model

    study = load_study(run)
    network = load_trained_model(study, model)
    if note := describe_missing(study.assembly, model):
        console.print(note)
    folder = out or run / "saved"
    network = compact_model(network) if form == "compact" else network
    if form in ("sparse", "int8"):
        save_small_run(study, model, folder, "int8" if form == "int8" else None)
    elif form == "csr":
        save_csr(network, folder / "csr")
    elif form == "onnx":
        _save_onnx(study, network, folder, data)
    else:
        study.assembly.task.save(network, folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    total, dense = sum(path.stat().st_size for path in files), sum(t.nbytes for t in network.state_dict().values())
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())))
    console.print(f"{total:,} bytes in {len(files)} files; the dense model takes {dense:,}")


def _save_onnx(study: Study, network: nn.Module, folder: Path, data: Path | None) -> None:
    """Write a network as ONNX, without units that compute nothing where there are some.

    Raises:
        ConfigError: onnx is not installed, there is no data, or the network cannot be exported.
    """
    from ..compute.structure.compact import compact_model
    from ..results.runs.exports import export_onnx

    # Most networks have no such unit, or cannot be traced.
    with suppress(ConfigError):
        network = compact_model(network)
    inputs = _load_inputs(study, data)
    folder.mkdir(parents=True, exist_ok=True)
    largest_error = export_onnx(network, inputs, folder / "model.onnx")
    console.print(f"model.onnx computes the same within {largest_error:.2g}")


def _load_inputs(study: Study, data: Path | None) -> Tensor:
    """Return inputs of test examples, of the given data or else of the first simulated site.

    Raises:
        ConfigError: the network takes more than one tensor, or there is no data.
    """
    from ..config.withdrawals import open_data
    from ..results.runs.cost import load_inputs

    if data is not None:
        site = open_data(study.folder, data, "data")
    elif study.config.simulator is None:
        raise ConfigError("--format onnx: the run has no simulator section and so no data; add --data DIR")
    else:
        site = next(iter(study.prepare_sites(study.folder, Screen()).values()))
    return load_inputs(study, site, _INPUTS)
