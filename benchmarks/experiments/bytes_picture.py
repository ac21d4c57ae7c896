"""Draw how few bytes each method needs for the quality of FedAvg, from the tables of docs/results/.

    python benchmarks/experiments/bytes_picture.py docs/images/quality_by_bytes.png

One panel for each study: brain age from T1w volumes (bytes.md), segmentation of the hippocampus (hippocampus_runs.csv)
and intents of texts with adapters (lora_banking77.csv). Bytes are those of all messages of a run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from page_tables import read_table

from flare_sparse.results.report.figures import STYLE

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FEDAVG = "FedAvg"
COLOURS = {
    FEDAVG: "0.6",
    f"{FEDAVG} of LoRA": "0.6",
    "top-k both ways": "C0",
    "top-k 10 %": "C5",
    "top-k": "C5",
    "NeuroSFL": "C2",
    "FedSparsify": "C1",
    "LoRA-A2": "C3",
    "FFA-LoRA": "C4",
    "FlexLoRA": "C6",
    "HetLoRA": "C7",
}
"""Colour of a method, the same in every panel."""
ABLATIONS = ("FedAvg, float32, learning rate 0.003", "the same, without decay")


@dataclass(frozen=True)
class Point:
    """A run of one study.

    Attributes:
        method: name in the legend.
        setting: what the runs of the method differ in.
        sent: megabytes of a run, all sites, both ways.
        value, low, high: quality with the ends of its interval or range.
    """

    method: str
    setting: str
    sent: float
    value: float
    low: float
    high: float


def read_brain_age() -> list[Point]:
    """Return the methods of the first table of bytes.md: mean absolute error in years."""
    points = []
    for line in (RESULTS / "bytes.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().strip("*") for cell in line.strip("|").split("|")]
        if (
            len(cells) == 5
            and cells[0] not in ABLATIONS
            and (found := re.fullmatch(r"(\S+) \[(\S+), (\S+)\]", cells[1]))
        ):
            name, _, setting = cells[0].partition(", ")
            method = "top-k both ways" if name == "the same" else name
            points.append(Point(method, setting, float(cells[3].split()[0]), *map(float, found.groups())))
    return points


def read_hippocampus() -> list[Point]:
    """Return the federated runs of the page on segmentation: Dice."""
    names = {"fedavg": FEDAVG, "neurosfl": "NeuroSFL", "fedsparsify": "FedSparsify", "topk_ef": "top-k"}
    points = []
    for row in read_table("segmentation", "Dice"):
        method = row["run"].removesuffix("_int4")
        if method in names:
            figures = map(float, re.findall(r"[\d.]+", row["Dice"]))
            setting = row["sparsity"] + ("" if method == row["run"] else " int4")
            points.append(Point(names[method], setting, float(row["MB"]), *figures))
    return points


def read_texts() -> list[Point]:
    """Return the methods on BANKING77 by rank: accuracy in percent, mean and range over seeds."""
    runs = defaultdict(list)
    for row in read_table("texts", "best round"):
        sent = sum(float(row[way].split()[0]) for way in ("up", "down"))
        name = f"{FEDAVG} of LoRA" if row["method"] == "FL+LoRA" else row["method"]
        runs[name, f"rank {row['rank']}"].append((sent, float(row["accuracy, %"])))
    points = []
    for names, pairs in runs.items():
        sent, values = np.array(pairs).T
        points.append(Point(*names, sent.mean(), values.mean(), values.min(), values.max()))
    return points


def select_level(points: list[Point], sign: int) -> tuple[Point, dict[str, Point | None]]:
    """Return FedAvg, and of each method the run of fewest bytes that is not behind it; None: none is.

    A run is not behind if its interval has FedAvg's quality, or is better: higher with ``sign`` 1, lower with -1.
    """
    reference = next(point for point in points if point.method.startswith(FEDAVG))
    found: dict[str, Point | None] = {}
    for point in sorted(points, key=lambda point: point.sent):
        if point.method != reference.method and found.get(point.method) is None:
            best = max(sign * point.low, sign * point.high)
            found[point.method] = point if best >= sign * reference.value else None
    return reference, found


def draw_bars(axis: Axes, points: list[Point], sign: int) -> None:
    """Draw the bytes of FedAvg and of each method that reaches its quality, with that quality and its interval."""
    reference, found = select_level(points, sign)
    reached = sorted((point for point in found.values() if point), key=lambda point: -point.sent)
    for row, point in enumerate([reference, *reached]):
        axis.barh(row, point.sent, color=COLOURS[point.method], height=0.62)
        text = f"{point.sent:.4g} MB\n{point.value:.4g} [{point.low:.4g}, {point.high:.4g}]"
        axis.text(point.sent * 1.15, row, text, va="center", fontsize=8)
    names = [f"{point.method}\n{point.setting}".strip() for point in (reference, *reached)]
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.invert_yaxis()
    missed = [method for method, point in found.items() if point is None]
    label = "MB sent, all sites, both ways" + (f"\nnot at FedAvg's quality: {', '.join(missed)}" if missed else "")
    axis.set(xscale="log", xlabel=label)
    axis.set_xlim(0.5, reference.sent * 40)
    axis.grid(axis="y", visible=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="PNG to write")
    arguments = parser.parse_args()
    plt.style.use(STYLE)
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2), layout="constrained")
    studies = {
        "Brain age: bytes to FedAvg's error (years)": (read_brain_age(), -1),
        "Hippocampus: bytes to FedAvg's Dice": (read_hippocampus(), 1),
        "Texts: bytes to FedAvg's accuracy (%)": (read_texts(), 1),
    }
    for axis, (title, study) in zip(axes, studies.items(), strict=True):
        draw_bars(axis, *study)
        axis.set_title(title, fontsize=10)
    figure.savefig(arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
