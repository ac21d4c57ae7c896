"""The table of ``kernels.py``: lines to Markdown and back, so that later runs add to those of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

MARK = "<!-- tables -->"
KEY = ("what", "network", "pattern", "sparsity", "batch", "threads")
"""Fields that tell a line from all others."""
ORDER = ("layer", "training", "inference")

Line = dict[str, Any]


def merge_lines(earlier: Iterable[Line], later: Iterable[Line]) -> list[Line]:
    """Return all lines, a later one in place of an earlier one of the same key; numbers of threads lie side by side."""
    merged = {tuple(line.get(name) for name in KEY): line for line in (*earlier, *later)}
    order = {key[:-1]: number for number, key in reversed(list(enumerate(merged)))}
    return [merged[key] for key in sorted(merged, key=lambda key: (order[key[:-1]], key[-1]))]


def format_table(lines: Iterable[Line]) -> str:
    """Return a Markdown table."""
    rows = ["| what | network | mask | sparsity | batch | threads | dense s | sparse s | ratio | ONNX dense s |"]
    rows.append("| --- " * 10 + "|")
    for line in lines:
        onnx = line.get("onnx_s")
        rows.append(
            f"| {line['what']} | {line['network']} | {line['pattern']} | {line['sparsity']:.0%} | "
            f"{line.get('batch') or ''} | {line['threads']} | {line['dense_s']:.4f} | {line['sparse_s']:.4f} | "
            f"{line['ratio']:.2f} | {'' if onnx is None else f'{onnx:.4f}'} |"
        )
    return "\n".join(rows) + "\n"


def read_table(text: str) -> list[Line]:
    """Return the lines of the tables in a text that :func:`format_table` wrote."""
    lines = []
    for row in text.splitlines():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        if len(cells) == 10 and cells[0] in ORDER:
            what, network, pattern, sparsity, batch, threads, dense, sparse, ratio, onnx = cells
            line: Line = {"what": what, "network": network, "sparsity": int(sparsity[:-1]) / 100, "pattern": pattern}
            line |= {"threads": int(threads), "dense_s": float(dense), "sparse_s": float(sparse), "ratio": float(ratio)}
            line |= {"batch": int(batch)} if batch else {}
            lines.append(line | ({"onnx_s": float(onnx)} if onnx else {}))
    return lines


def update_page(page: str, lines: Iterable[Line]) -> str:
    """Return a page whose table below ``MARK`` has the lines, too."""
    text, _, tables = page.partition(MARK)
    return f"{text}{MARK}\n\n{format_table(merge_lines(read_table(tables), lines))}"
