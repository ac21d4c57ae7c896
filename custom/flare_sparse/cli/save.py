"""``flare-sparse save``: write a run's model in a format that other libraries read, decrypted first if need be."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.errors import ConfigError
from .console import out as console
from .options import ModelName, TrustCode
from .screen import Screen

if TYPE_CHECKING:
    from torch import Tensor

    from ..config.study import Study

_INPUTS = 4
"""Examples on which the ONNX file is compared with the network."""


def save(
    run: Annotated[Path, typer.Argument(help="Result folder of a run", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: saved/ in the result folder")] = None,
    model: ModelName = "final",
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write ONNX, too, after a check that it computes the same on the run's data")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="Data for the check of --onnx; default: that of the run's first simulated site")
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(help="Key context of a site of an encrypted run: startup/client_context.tenseal in its kit"),
    ] = None,
    _trust_code: TrustCode = False,
) -> None:
    """Write a run's model as other libraries read it: adapters in the format of peft, networks as safetensors.

    A folder in $FLARE_SPARSE_MODELS can serve other tasks as their base model, by the folder's name. An encrypted run
    is decrypted first, which only a site can: neither the server nor the lead has the secret key. Its
    model.safetensors, and best_model.safetensors, stay beside the encrypted files.

    [dim]flare-sparse save runs/lora_a2_brain_age --out adapters/nsk[/]

    [dim]flare-sparse save runs/neurosfl_brain_age --onnx[/]

    [dim]flare-sparse save runs/neurosfl_encrypted --context /opt/flare/site-1/startup/client_context.tenseal[/]
    """
    from ..results.runs.load import load_study, load_trained_model
    from ..results.runs.models import describe_missing

    study = load_study(run)
    if context is not None:
        _decrypt(study, run, context)
    network = load_trained_model(study, model)
    if note := describe_missing(study.assembly, model):
        console.print(note, markup=False)
    folder = out or run / "saved"
    study.assembly.task.save(network, folder)
    if onnx:
        try:
            from ..results.runs.onnx_export import export_onnx
        except ImportError as error:
            raise ConfigError(
                f"--onnx needs onnx and onnxruntime: pip install 'flare-sparse[onnx]' ({error.name})"
            ) from error
        largest_error = export_onnx(network, _load_inputs(study, data), folder / "model.onnx")
        console.print(f"model.onnx computes the same within {largest_error:.2g}")
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())), markup=False)


def _decrypt(study: Study, run: Path, context: Path) -> None:
    """Decrypt the models of a run's folder, and write its card again.

    Raises:
        ConfigError: the key cannot be read, or the folder has no encrypted model.
    """
    from ..results.report.card import write_card
    from ..results.runs.decrypt import decrypt_run
    from ..results.runs.results import RunResult

    try:
        key = context.read_bytes()
    except OSError as error:
        raise ConfigError(f"--context {context}: cannot be read: {error.strerror}") from error
    if not decrypt_run(run, study.assembly, key):
        raise ConfigError(f"{run}: there is no encrypted model here; leave --context out")
    write_card(RunResult.read(run))


def _load_inputs(study: Study, data: Path | None) -> Tensor:
    """Return inputs of test examples, of the given data or else of the first simulated site.

    Raises:
        ConfigError: the network takes more than one tensor, or there is no data.
    """
    from torch import Tensor

    from ..config.withdrawals import Withdrawals
    from ..tasks.task import SiteData, load_examples

    if data is not None:
        site = Withdrawals.read(study.folder).open(SiteData("data", data.resolve()))
    elif study.config.simulator is None:
        raise ConfigError("--onnx: the run has no simulator section and so no data; add --data DIR")
    else:
        site = next(iter(study.prepare_sites(study.folder, Screen()).values()))
    task = study.assembly.task
    batch = next(task.iterate_batches(load_examples(task, site, study.config.seed).test, _INPUTS))
    inputs = batch[0] if isinstance(batch, (list, tuple)) else batch
    if not isinstance(inputs, Tensor):
        raise ConfigError(f"--onnx: expected a network whose input is one tensor, found {type(inputs).__name__}")
    return inputs
