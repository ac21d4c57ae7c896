"""``flare-sparse decrypt``: decrypt the model of an encrypted run, at a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.errors import ConfigError
from .console import out as console


def decrypt(
    run: Annotated[Path, typer.Argument(help="Result folder of a run with wire.encryption: ckks", show_default=False)],
    context: Annotated[
        Path, typer.Option(help="Key context of a site of that federation: startup/client_context.tenseal in its kit")
    ],
) -> None:
    """Decrypt the model of an encrypted run. Only a site can: neither the server nor the lead has the secret key.

    Writes model.safetensors, and best_model.safetensors if the run has a best model, beside the encrypted files.

    [dim]flare-sparse decrypt runs/neurosfl_encrypted --context /opt/flare/site-1/startup/client_context.tenseal[/]
    """
    from ..results.report.card import write_card
    from ..results.runs.decrypt import decrypt_run
    from ..results.runs.load import load_study
    from ..results.runs.results import RunResult

    assembly = load_study(run).assembly
    try:
        key = context.read_bytes()
    except OSError as error:
        raise ConfigError(f"--context {context}: cannot be read: {error.strerror}") from error
    written = decrypt_run(run, assembly, key)
    if not written:
        raise ConfigError(
            f"{run}: there is no encrypted model here; give the result folder of a run with wire.encryption: ckks"
        )
    write_card(RunResult.read(run))
    for path in written:
        console.print(str(path), markup=False)
