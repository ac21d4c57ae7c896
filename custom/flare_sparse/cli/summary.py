"""The end of a run on the screen: metric per site, bytes beside dense, where things lie, what to try next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..runs.progress import human_bytes


def show_result(console: Console, summary: dict[str, Any], out: Path) -> None:
    """Print a finished run's summary."""
    metric = summary["metric"]
    name, unit = metric["name"], metric["unit"]
    console.print(_sites_table(summary, name, unit))
    console.print(_bytes_table(summary))
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
        console.print(f"model:  encrypted; a site can open it: flare-sparse decrypt {out} --context FILE", markup=False)
    log = "; FLARE's log: flare.log" if (out / "flare.log").is_file() else ""
    console.print(f"record: {out / 'summary.json'}, rounds.jsonl, ledger.jsonl, config.yaml, model_card.md{log}")
    console.print(f"look:   flare-sparse report {out}")
    console.print(_next_step(summary))


def _sites_table(summary: dict[str, Any], name: str, unit: str) -> Table:
    table = Table(title=f"{summary['name']}: final model at each site", title_justify="left")
    table.add_column("site")
    table.add_column(f"{name} ({unit})" if unit else name, justify="right")
    table.add_column("test examples", justify="right")
    for site, figures in sorted(summary["final"]["sites"].items()):
        shown = f"{figures[name]:.3f}" if name in figures else "-"
        table.add_row(site, shown, f"{figures.get('test_examples', 0):.0f}")
    overall = summary["final"]["metrics"]
    if name in overall:
        table.add_section()
        table.add_row("all sites", f"{overall[name]:.3f}", f"{overall.get('test_examples', 0):.0f}")
    return table


def _bytes_table(summary: dict[str, Any]) -> Table:
    table = Table(title="bytes on the wire, whole run", title_justify="left")
    for column in ("direction", "messages", "sent", "dense FedAvg", "ratio", "floor"):
        table.add_column(column, justify="left" if column == "direction" else "right")
    for direction, label in (("down", "server to sites"), ("up", "sites to server")):
        sums = summary["traffic"][direction]
        sent, dense = sums["payload_bytes"], sums["dense_bytes"]
        table.add_row(
            label,
            f"{sums['messages']}",
            human_bytes(sent),
            human_bytes(dense),
            f"{dense / max(sent, 1):.1f}x less",
            human_bytes(sums["floor_bytes"]),
        )
    return table


def _next_step(summary: dict[str, Any]) -> str:
    if summary["method"] == "fedavg":
        return (
            "next: the same data with a sparse method, such as --set 'method={name: neurosfl}' (flare-sparse methods)"
        )
    rounds = summary["rounds"]
    return (
        f"next: dense FedAvg beside it (--set 'method={{name: fedavg, rounds: {rounds}, training: ...}}' with the training "
        "of config.yaml), another setting, or your own data: docs/"
    )
