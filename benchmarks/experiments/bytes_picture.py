"""Draw what each method sends and how good its model is, from the tables of docs/results/.

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

RESULTS = Path(__file__).parents[2] / "docs" / "results"
FEDAVG, GREY = "FedAvg", "0.45"
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


def draw_points(axis: Axes, points: list[Point]) -> None:
    """Draw the runs of each method over megabytes, the one of fewest labelled, and FedAvg's interval."""
    reference = next(point for point in points if point.method.startswith(FEDAVG))
    axis.axhspan(reference.low, reference.high, color=GREY, alpha=0.15, linewidth=0)
    others = dict.fromkeys(point.method for point in points if point.method != reference.method)
    for number, method in enumerate([reference.method, *others]):
        colour = f"C{number - 1}" if number else GREY
        runs = sorted((point for point in points if point.method == method), key=lambda point: point.sent)
        sent, values = [point.sent for point in runs], np.array([point.value for point in runs])
        ends = [values - [point.low for point in runs], [point.high for point in runs] - values]
        axis.errorbar(sent, values, ends, fmt="o", color=colour, markersize=4, label=method)
        if runs[0].setting:
            place = (sent[0], values[0])
            axis.annotate(runs[0].setting, place, xytext=(4, 4), textcoords="offset points", fontsize=8, color=colour)
    axis.margins(x=0.15)
    axis.set(xscale="log", xlabel="MB sent, all sites, both ways")
    axis.legend(fontsize=8)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="PNG to write")
    arguments = parser.parse_args()
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
    studies = {
        "Brain age, five sites: error in years, less is better": read_brain_age(),
        "Hippocampus, four sites: Dice, more is better": read_hippocampus(),
        "Intents of texts, ten sites: accuracy in %, more is better": read_texts(),
    }
    for axis, (title, points) in zip(axes, studies.items(), strict=True):
        draw_points(axis, points)
        axis.set_title(title, fontsize=10)
    figure.savefig(arguments.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
