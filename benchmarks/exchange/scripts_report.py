"""Write docs/results/bytes.md from the cells of ``scripts.py``, which calls this with ``--docs``.

The text above the tables is kept.
"""

from __future__ import annotations

import textwrap
from typing import Any

from examples import EXAMPLES, RECIPE, list_cells
from page_tables import write_section


def format_table(cells: list[dict[str, Any]], script: str) -> str:
    """Return a script's cells as a Markdown table, with those that were not run."""
    rows = [
        "| exchange | runs | accuracy | minus FedAvgRecipe | ledger | measured | of FedAvgRecipe |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    known = {(cell["exchange"], cell["mode"]): cell for cell in cells if cell["script"] == script}
    for name, exchange, mode in list_cells():
        if name != script:
            continue
        cell, dense = known.get((exchange, mode)), known.get((RECIPE, mode))
        if cell is None:
            rows.append(f"| {exchange} | {mode} | not run | | | | |")
            continue
        if "failure" in cell:
            rows.append(f"| {exchange} | {mode} | fails | | | | |")
            continue
        difference, share = "", ""
        if dense and dense is not cell and "failure" not in dense:
            difference = f"{cell['accuracy'] - dense['accuracy']:+.3f}"
            share = f"{cell['measured'] / dense['measured']:.2f}"
        ledger = "" if cell["ledger"] is None else f"{cell['ledger']:,}"
        figures = f"{cell['accuracy']:.3f} | {difference} | {ledger} | {cell['measured']:,} | {share}"
        rows.append(f"| {exchange} | {mode} | {figures} |")
    failures = [
        f"{exchange}, {mode}: `{cell['failure']}`" for (exchange, mode), cell in known.items() if "failure" in cell
    ]
    return "\n".join([*rows, *(f"\n{textwrap.fill(failure, 120)}" for failure in failures)])


def format_section(cells: list[dict[str, Any]], script: str) -> str:
    """Return the heading, the patch and the table of a script."""
    own = [cell for cell in cells if cell["script"] == script]
    patches = sorted({cell["patch"] for cell in own})
    changed = ", ".join(sorted({str(cell["changed"]) for cell in own})) or "not run"
    shown = "".join(f"```diff\n{patch}\n```\n\n" for patch in patches if patch)
    title = f"## {script}\n\n{EXAMPLES[script].rounds} rounds, `{EXAMPLES[script].args.format(data='DATA')}`."
    return f"\n{title} Lines changed: {changed}.\n\n{shown}{format_table(cells, script)}\n"


def write_page(cells: list[dict[str, Any]]) -> None:
    """Write the tables of docs/results/bytes.md."""
    write_section("bytes", "scripts", "".join(format_section(cells, script) for script in EXAMPLES))
