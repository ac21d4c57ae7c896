"""``flare-sparse decrypt``: the model of an encrypted run, at a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..encryption import CLIENT_FILE
from ..errors import ConfigError
from ..report.card import write_card
from ..runs.decrypt import decrypt_run
from ..runs.load import load_assembly
from ..runs.results import Run
from .console import out as console


def decrypt(
    run: Annotated[Path, typer.Argument(help="result folder of a run with wire.encryption")],
    context: Annotated[
        Path, typer.Option(help=f"{CLIENT_FILE} of a site of that federation: startup/{CLIENT_FILE} in its kit")
    ],
) -> None:
    """Make the model of an encrypted run readable. Only a site can: neither the server nor the lead has the key.

    Writes model.safetensors, and best_model.safetensors where there is one, beside the encrypted files.

    [dim]flare-sparse decrypt runs/neurosfl_encrypted --context /opt/flare/site-1/startup/client_context.tenseal[/]
    """
    assembly, _ = load_assembly(run)
    try:
        key = context.read_bytes()
    except OSError as error:
        raise ConfigError(f"--context {context}: cannot be read: {error.strerror}") from error
    written = decrypt_run(run, assembly, key)
    if not written:
        raise ConfigError(f"{run}: holds no encrypted model; was the run made with wire.encryption: ckks?")
    write_card(Run.read(run))
    for path in written:
        console.print(str(path), markup=False)
