"""Update the tables of BANKING77 in docs/results/texts.md from the files of ``banking77.py``, which calls this.

The text before and after the tables is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from page_tables import write_section
from runs import compare_scores

from flare_sparse.results.runs.progress import format_bytes

METHOD_LABELS = {
    "lora_a2": "LoRA-A2",
    "fedavg": "FL+LoRA",
    "ffa_lora": "FFA-LoRA",
    "flexlora": "FlexLoRA",
    "flasc": "FLASC",
}
Run = dict[str, Any]


def update_docs(folder: Path) -> None:
    """Write the tables from the finished runs in ``folder``; the page says which these are."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    tables = [*format_runs(runs), *format_differences(runs)] if runs else ["No run has finished yet."]
    write_section("texts", "banking77", "\n".join(tables), {2: "differences"})


def format_runs(runs: Iterable[Run]) -> list[str]:
    """Return a table of the finished runs."""
    lines = [
        "| rank | method | seed | accuracy, % | best round | rounds | ended by | M scalars up | up | down |",
        "|" + " --- |" * 10,
    ]
    order = list(METHOD_LABELS)
    for run in sorted(runs, key=lambda r: (-r["rank"], order.index(r["method"]), r["seed"])):
        hits = read_hits(run)[0]
        cells = [
            str(run["rank"]),
            METHOD_LABELS[run["method"]],
            str(run["seed"]),
            f"**{100 * hits.mean():.1f}**",
            str(run["best_round"]),
            str(run["rounds"]),
            "validation" if run["is_stopped"] else "the most rounds",
            f"{run['scalars_up'] / 1e6:.1f}",
            format_bytes(run["bytes_up"]),
            format_bytes(run["bytes_down"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def format_differences(runs: Iterable[Run]) -> list[str]:
    """Return a table of paired differences: of ranks 1 and 8, of LoRA-A2 and another, of FLASC and FL+LoRA."""
    by_name: dict[tuple[str, int], dict[int, Run]] = {}
    for run in runs:
        by_name.setdefault((run["method"], run["rank"]), {})[run["seed"]] = run
    pairs = [((name, 1), (name, 8)) for name in METHOD_LABELS]
    pairs += [(("lora_a2", rank), (other, rank)) for rank in (8, 1) for other in list(METHOD_LABELS)[1:]]
    pairs += [(("flasc", rank), ("fedavg", rank)) for rank in (8, 1)]
    rows = [row for pair in pairs if (row := format_difference(by_name, *pair))]
    if not rows:
        return []
    return ["", "| | seeds | points of accuracy [95 %] | verdict |", "| --- | --- | --- | --- |", *rows]


def format_difference(
    runs: Mapping[tuple[str, int], Mapping[int, Run]], first: tuple[str, int], second: tuple[str, int]
) -> str | None:
    """Return a row: the difference over the test texts of the seeds that both have; None without any."""
    seeds = sorted(runs.get(first, {}).keys() & runs.get(second, {}).keys())
    if not seeds:
        return None
    own = [read_hits(runs[first][seed]) for seed in seeds]
    other = [read_hits(runs[second][seed]) for seed in seeds]
    difference = compare_scores(
        np.concatenate([hits for hits, _ in own]),
        np.concatenate([hits for hits, _ in other]),
        np.concatenate([[f"{seed} {site}" for site in sites] for seed, (_, sites) in zip(seeds, own, strict=True)]),
        is_lower_better=False,
    )
    names = [f"{METHOD_LABELS[method]} rank {rank}" for method, rank in (first, second)]
    value, low, high = (100 * figure for figure in (difference.value, difference.low, difference.high))
    return (
        f"| {names[0]} minus {names[1]} | {' '.join(map(str, seeds))} | {value:+.1f} [{low:+.1f}, {high:+.1f}] | "
        f"{difference.verdict} |"
    )


def read_hits(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return for each test text whether its class was found, and its site, both ``(n,)``."""
    hits = [float(hit) for text in run["hits"].values() for hit in text]
    return np.array(hits), np.array([site for site, text in run["hits"].items() for _ in text])
