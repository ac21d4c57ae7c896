"""One HTML page that holds everything: it opens offline, prints, and reads on a phone."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from ..runs.progress import human_bytes
from ..runs.results import Run, gains_over_alone
from . import figures
from .findings import caveat, findings

FLOOR = (
    "Dense FedAvg: what it would have sent in each message's place. Floor: the values at their number format, and the "
    "entropy of which entries they are, given what the receiver held; no encoding of the same answers can be shorter. "
    "The rest is headers, padding and the encoding of the selection."
)


@dataclass(frozen=True)
class Drawing:
    """A figure of the page."""

    name: str
    title: str
    caption: str
    draw: Callable[[list[Run]], Figure]
    wanted: Callable[[list[Run]], bool] = lambda runs: True


DRAWINGS = (
    Drawing(
        "learning",
        "Quality",
        "Left: by round. Right: by bytes; further left is cheaper. A round is judged on the model that it starts from.",
        figures.learning,
        lambda runs: any(run.curve for run in runs),
    ),
    Drawing("traffic", "Bytes", FLOOR, figures.traffic),
    Drawing(
        "sites",
        "Sites",
        "A dot is a site's own test examples.",
        figures.sites,
        lambda runs: any(r.by_site for r in runs),
    ),
    Drawing(
        "gains",
        "Gain over training alone",
        "Each site's last figure against what it reached alone with the same seed, on the same test examples.",
        figures.gains,
        lambda runs: bool(gains_over_alone(runs)),
    ),
    Drawing(
        "layers",
        "Sparsity",
        "Share of each weight tensor that is on in the last model.",
        figures.layers,
        lambda runs: any(run.layers and min(run.layers.values()) < 1 for run in runs),
    ),
)


def write_report(runs: list[Run], out: Path) -> list[Path]:
    """Write ``report.html`` and its figures as PNG files; returns what was written."""
    out.mkdir(parents=True, exist_ok=True)
    written, shown = [], []
    for drawing in DRAWINGS:
        if not drawing.wanted(runs):
            continue
        data = figures.png(drawing.draw, runs)
        written.append(out / f"{drawing.name}.png")
        written[-1].write_bytes(data)
        width, height = struct.unpack(">II", data[16:24])  # of the PNG's first chunk
        alt = f"{drawing.title} of {', '.join(run.label for run in runs)}: the figures are in the tables of this page"
        shown.append(
            SimpleNamespace(
                title=drawing.title, caption=drawing.caption, alt=alt, width=width, height=height,
                data=base64.b64encode(data).decode(),
            )
        )  # fmt: skip
    environment = Environment(
        loader=PackageLoader("flare_sparse.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = out / "report.html"
    page.write_text(
        environment.get_template("page.html.jinja").render(**_content(runs), figures=shown), encoding="utf-8"
    )
    return [page, *written]


def _content(runs: list[Run]) -> dict[str, Any]:
    title = runs[0].summary["name"] if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.label for run in runs)}"
    names = sorted({site for run in runs for site in run.summary["sites"]})
    return {
        "title": title,
        "subtitle": f"{runs[0].summary['method']}, {len(names)} sites, {runs[0].summary['rounds']} rounds"
        if len(runs) == 1
        else f"{len(names)} sites; judged by {runs[0].metric_label}",
        "findings": findings(runs),
        "caveat": caveat(runs),
        "metric": runs[0].metric_label,
        "cards": _cards(runs[0]),
        "runs": [SimpleNamespace(label=r.label, summary=r.summary, config=_config(r)) for r in runs],
        "rows": [_row(run) for run in runs],
        "sites": [_site(site, runs) for site in names],
        "excluded": [entry for run in runs for entry in _list_excluded(run)],
        "version": version("flare-sparse"),
    }


def _cards(run: Run) -> list[tuple[str, str]]:
    return [
        (figure(run.final), f"{run.metric_label}, all sites"),
        (human_bytes(run.total("payload_bytes")), "sent"),
        (f"{run.less:.1f}x" if run.total("dense_bytes") else "-", "less than dense FedAvg"),
        (f"{100 * run.summary['sparsity']:.1f} %", "of the entries off"),
    ]


def _row(run: Run) -> SimpleNamespace:
    best, worst = run.summary["best"], run.worst
    return SimpleNamespace(
        label=run.label,
        final=figure(run.final),
        worst=f"{figure(worst[1])} ({worst[0]})" if worst else "-",
        best=f"{figure(best['metrics'].get(run.metric))} ({best['round']})" if best["round"] >= 0 else "-",
        sent=human_bytes(run.total("payload_bytes")),
        dense=human_bytes(run.total("dense_bytes")) if run.total("dense_bytes") else "-",
        less=f"{run.less:.1f}x" if run.total("dense_bytes") else "-",
        floor=human_bytes(run.total("floor_bytes")),
        sparsity=f"{100 * run.summary['sparsity']:.1f} %",
        rounds=run.summary["rounds"],
        seed=run.summary["seed"],
        seconds=f"{run.summary['seconds']:.0f}",
    )


def _site(site: str, runs: list[Run]) -> SimpleNamespace:
    tests = next(
        (r.summary["final"]["sites"][site].get("test_examples") for r in runs if site in r.summary["final"]["sites"]),
        None,
    )
    cells = [
        SimpleNamespace(text=figure(run.by_site.get(site)), worst=bool(run.worst and run.worst[0] == site))
        for run in runs
    ]
    return SimpleNamespace(name=site, tests="-" if tests is None else f"{tests:.0f}", cells=cells)


def _list_excluded(run: Run) -> list[SimpleNamespace]:
    found = []
    for line in run.rounds:
        why = {**line["rejected"], **dict.fromkeys(line["timed_out"], "no answer in time")}
        why |= dict.fromkeys(line.get("quarantined", []), "resting after several misses")
        why |= line.get("excluded", {})
        found += [SimpleNamespace(run=run.label, round=line["round"], site=s, why=w) for s, w in sorted(why.items())]
    return found


def _config(run: Run) -> str:
    file = run.path / "config.yaml"
    return file.read_text(encoding="utf-8") if file.is_file() else "config.yaml is missing"


def figure(value: float | None) -> str:
    """Three decimals, or a dash."""
    return "-" if value is None else f"{value:.3f}"
