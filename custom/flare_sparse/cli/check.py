"""``flare-sparse check``: find in seconds, and report together, what would stop a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import ConfigFile, Overrides


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    site_policy: Annotated[
        Path | None,
        typer.Option(help="Check the job against a site's policy, too: a file, or one of open, careful, strict"),
    ] = None,
) -> None:
    """Check a configuration: settings, model, and at every site data, a training step, predictions and metrics.

    A training script answers one request at one site; it is stopped after a minute.

    Every problem gets a FAIL line with its cause and the way out; WARN lines do not stop a run. The last line is the
    verdict. Exit code: 0 if nothing failed, 2 for a wrong configuration, else 1. Nothing leaves this machine.

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --set method.sparsity=0.95[/]

    [dim]flare-sparse check app_configs/neurosfl_brain_age.yaml --site-policy careful[/]
    """
    from .check_job import check_job

    raise typer.Exit(check_job(config, overrides or (), site_policy))
