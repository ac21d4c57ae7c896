"""``flare-sparse estimate``: count what a run will send, without data or training."""

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
from ..local.dry_run import estimate_traffic
from ..runs.folder import sum_traffic
from ..runs.progress import format_bytes
from .options import ConfigFile, Overrides, load_with_options


def estimate(
    config: ConfigFile,
    sites: Annotated[int | None, typer.Option(help="Number of sites; default: as configured")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training; default: as configured")] = None,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Count the scalars and bytes that a run will send, per round and in total, without data or training.

    The method runs with noise in place of trained weights, and every message is encoded and counted.

    Example:

        flare-sparse estimate app_configs/fedsparsify_paper.yaml --set method.sparsity=0.95 --json
    """
    resolved = load_with_options(config, sites, rounds, None, set_)
    figures = compute_figures(resolved, config)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        _show(Console(), figures)


def compute_figures(config: RunConfig, file: Path) -> dict[str, Any]:
    """Return the figures of a dry run.

    Raises:
        ConfigError: the configuration does not give the number of sites.
    """
    sites = config.simulator.sites if config.simulator else None
    if sites is None:
        raise ConfigError("the configuration does not give the number of sites; add --sites N")
    assembly = assemble(config, load_task(config, file.parent))
    outcome, ledger = estimate_traffic(
        assembly.method, assembly.weights, sites, config.wire.values, encrypted=config.encrypted
    )
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
    for column in ("round", "request", "down", "up", "dense", "live"):
        table.add_column(column, justify="right")
    for line in figures["per_round"]:
        table.add_row(
            str(line["round"]),
            line["kind"],
            format_bytes(line["bytes_down"]),
            format_bytes(line["bytes_up"]),
            format_bytes(line["dense_bytes"]),
            f"{1 - line['sparsity']:.1%}",
        )
    console.print(table)
    sent = sum(figures["traffic"][d]["payload_bytes"] for d in ("down", "up"))
    dense = sum(figures["traffic"][d]["dense_bytes"] for d in ("down", "up"))
    console.print(
        f"total: {format_bytes(sent)}; dense: {format_bytes(dense)}, {dense / max(sent, 1):.2f} times as much"
    )
    console.print(f"training messages carry {figures['scalars']:,} of {figures['dense_scalars']:,} scalars")
    if figures["paper_scalars"] is not None:
        console.print(f"by the paper's counting rule: {figures['paper_scalars']:,} scalars")
