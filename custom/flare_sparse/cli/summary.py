"""The summary of a finished run on the screen: metrics per site, bytes, files, and a next step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..runs.progress import format_bytes


def show_result(console: Console, summary: dict[str, Any], out: Path) -> None:
    """Print a finished run's summary."""
    metric = summary["metric"]
    name, unit = metric["name"], metric["unit"]
    console.print(_build_sites_table(summary, name, unit))
    console.print(_build_bytes_table(summary))
    if summary["note"]:
        console.print(f"{summary['method']}: {summary['note']}", markup=False)
    best = summary["best"]
    if best["round"] >= 0:
        figure = best["metrics"][name]
        console.print(f"best model: after round {best['round']}, {name} {figure:.3f} {unit}")
    digest = summary["model_sha256"]
    console.print(f"seconds: {summary['seconds']:.0f}" + (f"   model sha256: {digest[:16]}..." if digest else ""))
    if digest:
        console.print(f"model:  {out / 'model.safetensors'}  (best: best_model.safetensors)")
    else:
        console.print(
            f"model:  encrypted; a site can decrypt it: flare-sparse decrypt {out} --context FILE", markup=False
        )
    log = "; FLARE's log: flare.log" if (out / "flare.log").is_file() else ""
    console.print(f"record: {out / 'summary.json'}, rounds.jsonl, ledger.jsonl, config.yaml, model_card.md{log}")
    console.print(f"report: flare-sparse report {out}")
    console.print(_suggest_next_step(summary))


def _build_sites_table(summary: dict[str, Any], name: str, unit: str) -> Table:
    table = Table(title=f"{summary['name']}: final model at each site", title_justify="left")
    table.add_column("site")
    table.add_column(f"{name} ({unit})" if unit else name, justify="right")
    table.add_column("test examples", justify="right")
    for site, figures in sorted(summary["final"]["sites"].items()):
        value = f"{figures[name]:.3f}" if name in figures else "-"
        table.add_row(site, value, f"{figures.get('test_examples', 0):.0f}")
    overall = summary["final"]["metrics"]
    if name in overall:
        table.add_section()
        table.add_row("all sites", f"{overall[name]:.3f}", f"{overall.get('test_examples', 0):.0f}")
    return table


def _build_bytes_table(summary: dict[str, Any]) -> Table:
    table = Table(title="bytes on the wire, all rounds", title_justify="left")
    for column in ("direction", "messages", "sent", "dense FedAvg", "dense / sent", "floor"):
        table.add_column(column, justify="left" if column == "direction" else "right")
    for direction, label in (("down", "server to sites"), ("up", "sites to server")):
        sums = summary["traffic"][direction]
        sent, dense = sums["payload_bytes"], sums["dense_bytes"]
        table.add_row(
            label,
            f"{sums['messages']}",
            format_bytes(sent),
            format_bytes(dense),
            f"{dense / max(sent, 1):.1f}x",
            format_bytes(sums["floor_bytes"]),
        )
    return table


def _suggest_next_step(summary: dict[str, Any]) -> str:
    if summary["method"] == "fedavg":
        return (
            "next: a sparse method on the same data, such as --set 'method={name: neurosfl}' (see flare-sparse methods)"
        )
    rounds = summary["rounds"]
    return (
        f"next: dense FedAvg for comparison (--set 'method={{name: fedavg, rounds: {rounds}, training: ...}}' with the "
        "training section of config.yaml), another setting, or your own data (docs/)"
    )
