"""Seconds of a round of NeuroSFL against FLARE's FedAvgRecipe, without training, and the memory of a site.

Four sites, a model of 30 M (and 3 M) float32 parameters. A site trains a single scalar by one step on one example, so a
round consists of encoding, sending, loading, sending back and summing. FLARE's recipe runs with its defaults and, for
comparison, with the polling interval of our jobs. Memory is the peak of a site's process beyond what it had before it
built the network, libraries that are imported later included. From one size of the model to the next it grows by a
number of vectors of the model: the network's parameters alone are one.

    python benchmarks/performance/round_time.py [--json FILE] [--millions 30 3] [--rounds 6] [--sparsity 0.9]
        [--checkpoints] [--ours] [--docs]

A size whose row is in ``--json`` is not measured again; ``--docs`` writes all rows to docs/results/time.md.
Exits with 1 if NeuroSFL takes more than 1/8 of FLARE's time at 30 M, or more than FLARE's time at 3 M.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import tempfile
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from dense_passes import count_round
from idle_task import SITES, IdleNet
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from page_tables import write_section

from flare_sparse.config.schema import RunConfig
from flare_sparse.config.user_classes import import_class
from flare_sparse.flare.launch.simulator import Workplace, redirect_output, simulate
from flare_sparse.flare.recipe import SparseRecipe

BOUND = {30: 0.125, 3: 1.0}
HERE = Path(__file__).resolve()


CLIENT = """
import nvflare.client as flare

flare.init()
while flare.is_running():
    flare.send(flare.receive())
"""


def read_sites_memory(folder: Path) -> int:
    """Return the largest number of bytes that a site wrote into a folder."""
    return max(int(file.read_text()) for file in folder.glob("*.memory"))


def count_vectors(small: dict[str, Any], large: dict[str, Any]) -> float:
    """Return the vectors of the model by which memory grows from a small model to a large one."""
    entries = large["parameters"] - small["parameters"]
    return (large["neurosfl_bytes"] - small["neurosfl_bytes"]) / (4 * entries)


def name_size(row: dict[str, Any]) -> str:
    return f"{row['parameters'] // 1_000_000} M at {row['sparsity']:.0%}"


def time_neurosfl(
    millions: int, rounds: int, folder: Path, sparsity: float = 0.9, *, checkpoints: bool = False
) -> list[float]:
    """Return the seconds between the commits of successive rounds."""
    settings = {
        "name": "neurosfl",
        "method": {
            "name": "neurosfl",
            "rounds": rounds,
            "sparsity": sparsity,
            "scores": "random",
            "training": {"optimizer": "sgd", "lr": 1e-6},
        },
        "task": {"class": "idle_task.IdleTask", "millions": millions},
        "federation": {"min_sites": 4},
        "deployment": {"packaging": "byoc"},
    }
    task = import_class("task", "idle_task.IdleTask", HERE.parent)
    config = RunConfig.model_validate(settings, context={"task": {"idle_task.IdleTask": task.Config}})
    sites = folder / "sites"
    sites.mkdir(parents=True)
    for site in SITES:
        (sites / f"{site}.yaml").write_text(f"data: {folder}\n")
    recipe = SparseRecipe(config, modules=(HERE.with_name("idle_task.py"),))
    kept = folder / "checkpoints" if checkpoints else None
    # The default policy refuses models of more than 2^28 entries.
    policy = folder / "policy.yaml"
    policy.write_text(f"max_model_entries: {1_000_000 * (millions + 1)}\n")
    workplace = Workplace(SITES, str(sites / "{site}.yaml"), checkpoints=kept, policy=policy)
    simulate(recipe, workplace, folder / "ours")
    lines = [json.loads(line) for line in (folder / "ours" / "rounds.jsonl").read_text().splitlines()]
    times = [line["committed_at"] for line in lines if line["kind"] == "train"]
    return [b - a for a, b in pairwise(times)]


def time_flare(millions: int, rounds: int, folder: Path, interval_s: float | None) -> list[float]:
    """Return the seconds between the starts of successive rounds of FLARE's FedAvgRecipe."""
    folder.mkdir(parents=True)
    script = folder / "client.py"
    script.write_text(CLIENT)
    recipe = FedAvgRecipe(
        name="fedavg", model=IdleNet(millions=millions), min_clients=4, num_rounds=rounds, train_script=str(script)
    )
    if interval_s is not None:
        recipe.add_server_config({"server": {"task_request_interval": interval_s}})
    with redirect_output(folder / "flare.log"):
        recipe.execute(SimEnv(clients=SITES, workspace_root=str(folder / "workspace")))
    text = (folder / "flare.log").read_text(errors="replace")
    starts = dict(parse_round_starts(text))
    times = [starts[n] for n in sorted(starts)]
    if len(times) < rounds:
        raise RuntimeError(f"FLARE's FedAvg ran {len(times)} of {rounds} rounds; see {folder / 'flare.log'}")
    return [b - a for a, b in pairwise(times)]


def parse_round_starts(text: str) -> list[tuple[int, float]]:
    """Return (round, time) of each "Round n started", a banner below the log line that carries the time."""
    stamps, moment = [], 0.0
    for line in text.splitlines():
        if match := re.search(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - ", line):
            moment = datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if match := re.search(r"Round (\d+) started", line):
            stamps.append((int(match[1]), moment))
    return stamps


def measure(arguments: argparse.Namespace, millions: int, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"parameters": millions * 1_000_000, "sparsity": arguments.sparsity}
    if not arguments.ours:
        row["flare_s"] = statistics.median(time_flare(millions, arguments.rounds, folder / "default", None))
        row["flare_fast_polling_s"] = statistics.median(time_flare(millions, arguments.rounds, folder / "fast", 0.05))
    times = time_neurosfl(millions, arguments.rounds, folder, arguments.sparsity, checkpoints=arguments.checkpoints)
    row["neurosfl_s"], row["neurosfl_bytes"] = statistics.median(times), read_sites_memory(folder)
    if not arguments.ours:
        row["ratio"], row["bound"] = row["neurosfl_s"] / row["flare_s"], BOUND.get(millions, 1.0)
    return row


def format_row(row: dict[str, Any]) -> str:
    ours = (
        f"NeuroSFL {row['sparsity']:.0%} {row['neurosfl_s']:.2f} s, memory of a site "
        f"{row['neurosfl_bytes'] // 2**20} MiB"
    )
    if "flare_s" in row:
        ours += (
            f"; FLARE FedAvg {row['flare_s']:.2f} s (fast polling {row['flare_fast_polling_s']:.2f} s); "
            f"ratio {row['ratio']:.3f}, bound {row['bound']}"
        )
    return f"{row['parameters'] // 1_000_000:>3} M parameters: {ours}"


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write the page's section, without its title."""
    passes = {end: counter.count for end, counter in count_round(1, 0.9).items()}
    rounding = {end: counter.count for end, counter in count_round(1, 0.9, "bfloat16").items()}
    rows = sorted(rows, key=lambda row: row["parameters"])
    text = format_page(rows, passes, rounding)
    write_section("time", "round_time", text.partition("\n\n")[2])


def format_commands(rows: list[dict[str, Any]]) -> list[str]:
    """Return the commands that measure the rows: one for each sparsity, with and without FLARE's recipe."""
    sizes: dict[tuple[bool, float], list[str]] = {}
    for row in rows:
        sizes.setdefault(("flare_s" not in row, row["sparsity"]), []).append(str(row["parameters"] // 1_000_000))
    return [
        f"python benchmarks/performance/round_time.py --json FILE --sparsity {sparsity} --millions {' '.join(millions)}"
        + (" --ours" if is_ours else "")
        for (is_ours, sparsity), millions in sorted(sizes.items())
    ]


def format_page(rows: list[dict[str, Any]], passes: dict[str, int], rounding: dict[str, int]) -> str:
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}"
    lines = [
        "# Time of a round",
        "",
        "```bash",
        *format_commands(rows),
        "```",
        "",
        f"and `--docs`, on {machine}: seconds of a round without training, four sites",
        "in FLARE's simulator, median of successive rounds, all processes on one core (`taskset -c 0`). Memory is the",
        "peak of a site's process beyond what it had before it built the network, libraries that are imported later",
        "included.",
        "",
        "| parameters | sparsity | FLARE's FedAvg | with our polling | NeuroSFL | ratio | memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [f"{row['parameters'] // 1_000_000} M", f"{row['sparsity']:.0%}"]
        keys = ("flare_s", "flare_fast_polling_s", "neurosfl_s", "ratio", "neurosfl_bytes")
        formats = ("{:.2f} s", "{:.2f} s", "{:.2f} s", "{:.3f}", "{} MiB")
        figures = {key: value // 2**20 if key.endswith("bytes") else value for key, value in row.items()}
        cells += [form.format(figures[key]) if key in row else "" for key, form in zip(keys, formats, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    if len(rows) > 1:
        lines += [
            "",
            f"A site's memory, from {name_size(rows[0])}, grows by these vectors of the model; the parameters of",
        ]
        larger = [row for row in rows if row["parameters"] > rows[0]["parameters"]]
        growth = [f"{count_vectors(rows[0], row):.1f} to {name_size(row)}" for row in larger]
        lines += [f"the network alone are one: {', '.join(growth)}."]
    for row in rows:
        if "ratio" in row and row["parameters"] == 30_000_000:
            is_reached = "reached" if row["ratio"] <= BOUND[30] else "not reached"
            lines += ["", f"The goal at 30 M is {BOUND[30]} of FLARE's time: {is_reached}."]
            lines += [
                f"{name_size(large)} takes {large['neurosfl_s'] / row['neurosfl_s']:.1f} times the seconds of "
                f"{name_size(row)}; the goal is 2."
                for large in rows
                if large["parameters"] == 300_000_000
            ]
    lines += [
        "",
        "`python benchmarks/performance/dense_passes.py` counts operations that read or write the whole vector in a",
        "round whose mask has not changed, checkpoints and records of requests included:",
        f"{passes['site']} at a site, {passes['server']} at the server, whatever the number of sites. A format that",
        f"rounds keeps a residual of the whole vector: {rounding['site']} and {rounding['server']} passes in bfloat16.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="rows of sizes that are measured, and of those that were")
    parser.add_argument("--millions", type=int, nargs="+", default=[30, 3])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--checkpoints", action="store_true", help="write NeuroSFL's checkpoints, as a deployed job")
    parser.add_argument("--ours", action="store_true", help="leave out FLARE's recipe")
    parser.add_argument("--docs", action="store_true", help="write docs/results/time.md")
    arguments = parser.parse_args()
    rows = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else []
    measured = {(row["parameters"], row["sparsity"]) for row in rows}
    for millions in arguments.millions:
        if (millions * 1_000_000, arguments.sparsity) in measured:
            continue
        with tempfile.TemporaryDirectory() as name:
            rows.append(measure(arguments, millions, Path(name)))
        print(format_row(rows[-1]), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if arguments.docs:
        write_page(rows)
    return int(any(row["ratio"] > row["bound"] for row in rows if "ratio" in row))


if __name__ == "__main__":
    sys.exit(main())
