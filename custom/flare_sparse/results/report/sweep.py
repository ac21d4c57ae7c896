"""Figure of a sweep: the metric on validation examples by settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

# Figures are rendered without a display; the backend must be set before pyplot is imported.
mpl.use("Agg")
import matplotlib.pyplot as plt

from ..runs.sweep import SettingsResult
from .figures import STYLE


def write_sweep_figure(ranked: Sequence[SettingsResult], metric: str, file: Path) -> None:
    """Write a PNG file with a row for each setting, best on top: a dot for each seed, a bar for their mean."""
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 1.2 + 0.35 * len(ranked)), layout="constrained")
        for row, result in enumerate(ranked):
            values = list(result.values.values())
            axes.plot(values, [row] * len(values), "o", color="C0", alpha=0.6)
            if result.mean is not None:
                axes.plot([result.mean], [row], "|", color="C1", markersize=16, markeredgewidth=2)
        axes.set_yticks(range(len(ranked)), [_label(result) for result in ranked])
        axes.invert_yaxis()
        axes.set(xlabel=f"{metric} on validation examples", title="Settings, best first")
        figure.savefig(file, format="png", metadata={"Software": None})
        plt.close(figure)


def _label(result: SettingsResult) -> str:
    failed = f" ({len(result.failures)} failed)" if result.failures else ""
    return ", ".join(result.settings) + failed
