"""Figure of a sweep: the metric on validation examples by settings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

# Figures are rendered without a display; the backend must be set before pyplot is imported.
mpl.use("Agg")
import matplotlib.pyplot as plt

from ..runs.sweep import SettingsResult
from .figures import STYLE


def write_sweep_figure(
    ranked: Sequence[SettingsResult], methods: Sequence[Mapping[str, Any]], metric: str, file: Path
) -> None:
    """Write a PNG file with a row for each setting, best on top: a dot for each seed, a bar for their mean.

    Below, where methods were compared, the paired difference of each from the first, with its 95 % interval.
    """
    compared = [row for row in methods if row["difference"]]
    heights = [1.2 + 0.35 * len(ranked), *([1.2 + 0.35 * len(compared)] if compared else [])]
    with plt.style.context(STYLE):
        size = (8, sum(heights))
        figure, grid = plt.subplots(
            len(heights), figsize=size, height_ratios=heights, squeeze=False, layout="constrained"
        )
        axes, *below = grid[:, 0]
        for row, result in enumerate(ranked):
            values = list(result.values.values())
            axes.plot(values, [row] * len(values), "o", color="C0", alpha=0.6)
            if result.mean is not None:
                axes.plot([result.mean], [row], "|", color="C1", markersize=16, markeredgewidth=2)
        axes.set_yticks(range(len(ranked)), [_label(result) for result in ranked])
        axes.invert_yaxis()
        axes.set(xlabel=f"{metric} on validation examples", title="Settings, best first")
        for place in below:
            for row, found in enumerate(compared):
                value, low, high = (found["difference"][name] for name in ("value", "low", "high"))
                place.errorbar([value], [row], xerr=[[value - low], [high - value]], fmt="o", color="C0", capsize=3)
            place.axvline(0, color="0.5", linewidth=1)
            place.set_yticks(range(len(compared)), [row["method"] for row in compared])
            place.invert_yaxis()
            name = f"{methods[0]['metric']}: difference from {methods[0]['method']}"
            place.set(xlabel=f"{name}, same subjects, 95 %")
        figure.savefig(file, format="png", metadata={"Software": None})
        plt.close(figure)


def _label(result: SettingsResult) -> str:
    failed = f" ({len(result.failures)} failed)" if result.failures else ""
    return ", ".join(result.settings) + failed
