"""Command-line options that several commands share, and the configuration that they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..config.loading import load_config
from ..config.schema import RunConfig

ConfigFile = Annotated[
    Path, typer.Argument(help="Configuration file, such as app_configs/neurosfl_brain_age.yaml", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY.PATH=VALUE", help="Override a setting, such as method.sparsity=0.95; repeatable"
    ),
]


def load_with_options(
    config: Path, sites: int | None, rounds: int | None, seed: int | None, overrides: list[str] | None
) -> RunConfig:
    """Load a configuration; ``--sites``, ``--rounds`` and ``--seed`` win over ``--set``, which wins over the file."""
    short = {"simulator.sites": sites, "method.rounds": rounds, "seed": seed}
    option_overrides = [f"{key}={value}" for key, value in short.items() if value is not None]
    return load_config(config, [*(overrides or []), *option_overrides])
