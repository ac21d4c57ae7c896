"""``flare-sparse save``: a run's model in the form that others open."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..assemble import assemble
from ..config import build_task, load_config, user_task
from ..errors import ConfigError
from ..records import load_model
from .console import out as console


def save(
    run: Annotated[Path, typer.Argument(help="result folder of a run")],
    to: Annotated[Path | None, typer.Option(help="folder to write; default: saved/ in the result folder")] = None,
    best: Annotated[bool, typer.Option("--best", help="the best model by the task's metric, not the last")] = False,
) -> None:
    """Write a run's model as its own library reads it: adapters as peft does, a network as model.safetensors.

    A folder written into $FLARE_SPARSE_MODELS is a base for other tasks, by its name.

    [dim]flare-sparse save runs/lora_a2_brain_age --to adapters/nsk[/]
    """
    file = run / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{run}: no config.yaml; expected the result folder of flare-sparse run or rehearse")
    config = load_config(file)
    own = build_task(config, user_task(config.task.name, file.parent)) if config.task.key == "class" else None
    assembly = assemble(config, own)
    weights = load_model(run / ("best_model.safetensors" if best else "model.safetensors"), assembly.layout)
    model = assembly.task.model()
    model.load_state_dict(assembly.layout.unflatten(weights), strict=False)
    folder = to or run / "saved"
    assembly.task.save(model, folder)
    console.print(f"{folder}: " + ", ".join(sorted(path.name for path in folder.iterdir())), markup=False)
