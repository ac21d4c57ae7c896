"""``flare-sparse estimate``: bytes and scalars of a run, without data or training; memory of a step, with data."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..core.errors import ConfigError, FlareSparseError
from ..results.runs.progress import compare_with_dense, format_bytes, format_duration
from .console import build_table, print_json
from .console import out as stdout
from .options import ConfigFile, Overrides


def estimate(
    config: ConfigFile,
    subjects: Annotated[
        int | None,
        typer.Option(
            min=1, help="With privacy: training subjects of every site, where the data is not here to count them"
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Also take training steps on a site's data: memory, and the time of all steps on this machine",
        ),
    ] = False,
    link: Annotated[
        str | None,
        typer.Option(help="Also the time of a site's messages on its link, such as 10mbit; its delays not counted"),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME,...", help="Compare methods instead: which fit the study, and their bytes"),
    ] = None,
    set_: Overrides = None,
) -> None:
    """Count the scalars and bytes that a run will send, per round and in total, without training.

    The method runs with noise in place of trained weights, and every message is encoded and counted. Where the settings
    decide every message, the figures are those of the run's ledger; where trained values decide what is sent, they are
    typical ones. A site's limits are checked on each message itself, before it leaves.

    All figures hold for sites that answer every request at the first attempt. They are bytes of messages: the
    connections carry more (docs/wire-format.md).

    With a privacy section, epsilon of the whole job is printed with each site's sampling rate, steps and noise. It does
    not depend on values of the data, only on the number of subjects.

    Examples:

        flare-sparse estimate app_configs/fedsparsify_paper.yaml --set method.sparsity=0.95 --json

        flare-sparse estimate app_configs/topk_ef_brain_age.yaml --set simulator.sites=8

        flare-sparse estimate app_configs/dp_morphometry_age.yaml --subjects 100 --json

        flare-sparse estimate app_configs/neurosfl_segmentation.yaml --measure

        flare-sparse estimate app_configs/neurosfl_brain_age.yaml --methods fedavg,neurosfl,topk_ef --link 10mbit
    """
    from ..api.estimate import compare_methods, compute_figures, forecast_privacy, parse_link
    from ..config.study import Study

    asked: dict[str, Any] = {"measures": measure, "rate": None if link is None else parse_link(link)}
    if methods is None:
        study = Study.load(config, set_ or ())
        figures = compute_figures(study, **asked)
        if study.config.privacy is not None:
            figures |= forecast_privacy(study, subjects)
        if not print_json(figures):
            _show(stdout, figures)
        return
    if subjects is not None:
        raise ConfigError("--subjects is for one method; leave it or --methods out")
    compared = compare_methods(config, set_ or (), [name.strip() for name in methods.split(",")], **asked)
    typed = [str(config), *(word for override in set_ or () for word in ("--set", override))]
    rows = [_describe_method(name, found, shlex.join(typed)) for name, found in compared.items()]
    if not print_json(rows):
        _show_methods(rows, asked["rate"])


def _describe_method(name: str, found: dict[str, Any] | FlareSparseError, study: str) -> dict[str, Any]:
    """Return whether a method fits, its bytes, and the command that starts it."""
    if isinstance(found, FlareSparseError):
        reasons = [line.strip() for line in str(found).splitlines() if line.startswith("  ")]
        return {"method": name, "fits": False, "reason": "; ".join(reasons) or str(found)}
    dense = sum(way["dense_bytes"] for way in found["traffic"].values())
    row = {"method": name, "fits": True, "bytes": found["bytes"]["total"], "dense_bytes": dense}
    if "seconds_on_link" in found:
        row["seconds_on_link"] = found["seconds_on_link"]
    if needs := found.get("memory"):
        row |= {"memory_bytes": needs["total"], "training_seconds": needs["training_seconds"]}
    return {**row, "command": f"flare-sparse run {study} --set method.name={name}"}


def _show_methods(rows: Sequence[Mapping[str, Any]], rate: float | None) -> None:
    """Print a row for each method that fits, then the commands, and why others do not fit."""
    fitting = [row for row in rows if row["fits"]]
    more = {
        "seconds_on_link": (f"at {(rate or 0) / 1e6:g} Mbit/s", format_duration),
        "memory_bytes": ("memory", format_bytes),
        "training_seconds": ("training", format_duration),
    }
    asked = [name for name in more if any(name in row for row in fitting)]
    cells = [
        [row["method"], format_bytes(row["bytes"]), compare_with_dense(row["bytes"], row["dense_bytes"])]
        + [more[name][1](row[name]) for name in asked]
        for row in fitting
    ]
    stdout.print(build_table("", ("method", "bytes", "than dense", *(more[name][0] for name in asked)), cells))
    for row in rows:
        text = row["command"] if row["fits"] else f"{row['method']} does not fit: {row['reason']}"
        stdout.print(text)


def _show(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"{figures['name']}: {figures['method']}, {figures['parameters']:,} parameters, {figures['sites']} sites, "
        f"{figures['rounds']} rounds"
    )
    console.print(_build_rounds_table(figures))
    dense = sum(figures["traffic"][direction]["dense_bytes"] for direction in ("down", "up"))
    sent = figures["bytes"]["total"]
    console.print(f"total: {format_bytes(sent)}" + (f"; {compare_with_dense(sent, dense)}" if dense else ""))
    console.print(f"training messages carry {figures['scalars']:,} of {figures['dense_scalars']:,} scalars")
    if figures["paper_scalars"] is not None:
        console.print(f"by the paper's counting rule: {figures['paper_scalars']:,} scalars")
    if (memory := figures.get("memory")) is not None:
        console.print(
            f"memory: {format_bytes(memory['total'])} in a step of {memory['batch_size']} examples at "
            f"{memory['site']}, {format_bytes(memory['weights'])} of it weights; data set and libraries come on top"
        )
        console.print(
            f"training: {format_duration(memory['training_seconds'])} at {memory['site']} on this machine, "
            f"{1000 * memory['step_seconds']:.1f} ms a step; evaluations and messages come on top"
        )
    if "seconds_on_link" in figures:
        console.print(f"a site's messages take {format_duration(figures['seconds_on_link'])} on its link")
    if "epsilon" in figures:
        _show_privacy(console, figures)


def _build_rounds_table(figures: Mapping[str, Any]) -> Table:
    """Return the table of the rounds."""
    rows = [
        [
            *(str(line["round"]), line["kind"]),
            *(format_bytes(line[name]) for name in ("bytes_down", "bytes_up", "dense_bytes")),
            f"{1 - line['sparsity']:.1%}",
        ]
        for line in figures["per_round"]
    ]
    return build_table("", ("round", "request", "down", "up", "dense", "live"), rows, left=())


def _show_privacy(console: Console, figures: dict[str, Any]) -> None:
    privacy, epsilon = figures["privacy"], figures["epsilon"]
    if epsilon is None:
        console.print("privacy: epsilon depends on the number of subjects; add --subjects N")
        return
    console.print(f"privacy: epsilon {epsilon:.2f} at delta {privacy['delta']:g}, of a subject over the whole job")
    for name, site in privacy["sites"].items():
        console.print(
            f"  {name}: {site['subjects']} subjects, sampling rate {site['sample_rate']:.3g}, {site['steps']} steps, "
            f"noise {site['noise_multiplier']:.2f} * clip, epsilon {site['epsilon']:.2f}"
        )
