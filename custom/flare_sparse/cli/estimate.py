"""``flare-sparse estimate``: what a run will send, before any data is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..assemble import assemble
from ..config import RunConfig, load_task
from ..errors import ConfigError
from ..local.dry_run import estimate as dry_run
from ..runs.folder import sum_traffic
from ..runs.progress import human_bytes
from .run import with_options


def estimate(
    config: Annotated[Path, typer.Argument(help="configuration file")],
    sites: Annotated[int | None, typer.Option(help="number of sites")] = None,
    rounds: Annotated[int | None, typer.Option(help="rounds of training")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE, such as method.sparsity=0.95")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Count scalars and bytes of a whole run, per round and in total, without training.

    The method runs with noise in place of trained weights, so every message is really encoded and counted.

    Example:

        flare-sparse estimate app_configs/fedsparsify_paper.yaml --set method.sparsity=0.95 --json
    """
    resolved = with_options(config, sites, rounds, None, set_)
    figures = estimated(resolved, config)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        _show(Console(), figures)


def estimated(config: RunConfig, file: Path) -> dict[str, Any]:
    """The figures of a dry run.

    Raises:
        ConfigError: the number of sites is not known.
    """
    sites = config.simulator.sites if config.simulator else None
    if sites is None:
        raise ConfigError("estimate needs the number of sites: give --sites N")
    assembly = assemble(config, load_task(config, file.parent))
    outcome, ledger = dry_run(assembly.method, assembly.weights, sites, config.wire.values, encrypted=config.encrypted)
    rounds = [
        {
            "round": r.round,
            "kind": r.kind,
            "bytes_down": r.bytes_down,
            "bytes_up": r.bytes_up,
            "dense_bytes": r.dense_bytes,
            "sparsity": r.sparsity,
        }
        for r in outcome.rounds
    ]
    training = [line for line in ledger.lines if line.kind == "train"]
    return {
        "name": config.name,
        "method": config.method.name,
        "sites": sites,
        "rounds": config.method.config.rounds,
        "parameters": assembly.layout.size,
        "paper_scalars": assembly.method.count_paper_scalars(sites),
        "scalars": sum(line.scalars_sent for line in training),
        "dense_scalars": sum(line.scalars_total for line in training),
        "traffic": sum_traffic(ledger),
        "per_round": rounds,
    }


def _show(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"{figures['name']}: {figures['method']}, {figures['parameters']:,} parameters, {figures['sites']} sites, "
        f"{figures['rounds']} rounds"
    )
    table = Table()
    for column in ("round", "asked for", "down", "up", "dense", "live"):
        table.add_column(column, justify="right")
    for line in figures["per_round"]:
        table.add_row(
            str(line["round"]),
            line["kind"],
            human_bytes(line["bytes_down"]),
            human_bytes(line["bytes_up"]),
            human_bytes(line["dense_bytes"]),
            f"{1 - line['sparsity']:.1%}",
        )
    console.print(table)
    sent = sum(figures["traffic"][d]["payload_bytes"] for d in ("down", "up"))
    dense = sum(figures["traffic"][d]["dense_bytes"] for d in ("down", "up"))
    console.print(f"in total {human_bytes(sent)}; dense {human_bytes(dense)}: {dense / max(sent, 1):.2f}x less")
    console.print(f"training messages carry {figures['scalars']:,} scalars of {figures['dense_scalars']:,}")
    if figures["paper_scalars"] is not None:
        console.print(f"by the paper's own counting rule: {figures['paper_scalars']:,} scalars")
