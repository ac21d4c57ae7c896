"""FLARE's example scripts with the data and sizes of the benchmark, and what they are run with."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from segmentation_bundle import write_bundle

MAX_LINES = 6
RECIPE, COMPONENTS = "fedavg_recipe", "fedavg_components"
"""FLARE's recipe, and the same with three lines more: pruning at the server, masks and CSR at the sites."""
METHODS: dict[str, dict[str, Any]] = {
    "fedsparsify": {"sparsity": 0.9},
    "neurosfl": {"sparsity": 0.9},
    "topk_ef": {"fraction": 0.1},
    "scbf": {"budget": 0.1},
}
EXCHANGES = (RECIPE, COMPONENTS, *METHODS)
EXTERNAL = (RECIPE, "fedsparsify")
"""Exchanges that also run with the script as a process of its own."""
MODES = ("in process", "external process")


@dataclass(frozen=True)
class Example:
    """One of FLARE's examples.

    Attributes:
        model: class of its network.
        args: command line of its script; ``{data}`` is replaced by the path of the data.
        rounds: number of rounds.
        write_data: writes the data to a path, from the folder of all data sets.
        replacements: lines of its script that name data or sizes, and what replaces them.
    """

    model: str
    args: str
    rounds: int
    write_data: Callable[[Path, Path], None]
    replacements: tuple[tuple[str, str], ...] = ()


def write_images(source: Path, file: Path, train: int = 2000, test: int = 1000) -> None:
    """Write a random sample of CIFAR-10, the same each time, in the format of the data set."""
    random, arrays = np.random.default_rng(0), {}
    with np.load(source / "cifar10" / "cifar10_jpeg.npz") as data:
        for part, count in (("train", train), ("test", test)):
            ends, blob = data[f"{part}_ends"], data[f"{part}_blob"]
            rows = random.permutation(len(ends))[:count]
            pieces = [blob[ends[row - 1] if row else 0 : ends[row]] for row in rows]
            arrays[f"{part}_labels"] = data[f"{part}_labels"][rows]
            arrays[f"{part}_ends"] = np.cumsum([len(piece) for piece in pieces])
            arrays[f"{part}_blob"] = np.concatenate(pieces)
    with file.open("wb") as stream:
        np.savez(stream, **arrays)


EXAMPLES = {
    "hello-pt": Example(
        "model.SimpleNetwork",
        "--epochs 1 --num_workers 0",
        10,
        write_images,
        (('DATASET_PATH = "/tmp/nvflare/data"', 'DATASET_PATH = "{data}"'),),
    ),
    "hello-lightning": Example("model.LitNet", "--batch_size 4 --data_root {data}", 6, write_images),
    "monai-spleen": Example("model.FLUNet", "--bundle_root {data} --local_epochs 2", 6, write_bundle),
}


def list_cells() -> list[tuple[str, str, str]]:
    """Return script, exchange and mode of all cells."""
    runs = [(exchange, MODES[0]) for exchange in EXCHANGES] + [(exchange, MODES[1]) for exchange in EXTERNAL]
    return [(script, exchange, mode) for script in EXAMPLES for exchange, mode in runs]


def write_example(source: Path, example: Example, folder: Path, data: Path) -> str:
    """Write the example's script and network with its replacements to a folder; return the patch.

    Raises:
        SystemExit: a line to replace is not there, or there are too many of them.
    """
    original = (source / "client.py").read_text()
    text = original
    for old, new in example.replacements:
        if text.count(f"{old}\n") != 1:
            raise SystemExit(f"{source}/client.py: expected the line {old!r} once")
        text = text.replace(f"{old}\n", f"{new.format(data=data)}\n")
    (folder / "client.py").write_text(text)
    (folder / "model.py").write_text((source / "model.py").read_text())
    patch = list(
        difflib.unified_diff(original.splitlines(), text.splitlines(), "client.py", "client.py", "", "", 0, "")
    )
    if count_lines(patch) > MAX_LINES:
        raise SystemExit(f"{source}: {count_lines(patch)} lines changed; at most {MAX_LINES}")
    return "\n".join(patch)


def count_lines(patch: list[str]) -> int:
    """Return the number of lines that a patch adds."""
    return sum(line.startswith("+") and not line.startswith("+++") for line in patch)
