"""``flare-sparse estimate``: bytes and scalars of a run, without data or training."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..config.assemble import Assembly, assemble, plan_sampling, validate_site_settings
from ..config.schema import RunConfig
from ..config.user_tasks import load_task
from ..core.errors import ConfigError
from ..privacy.dp.forecast import Forecast
from ..results.runs.folder import sum_traffic
from ..results.runs.progress import compare_with_dense, format_bytes
from ..rounds.local.dry_run import DrySite, dry_run
from ..rounds.local.estimate import BytesRange, bound_messages
from ..tasks.data.partition import PARTITIONERS
from ..tasks.task import SiteData, Task
from ..wire.ledger import Ledger, LedgerLine
from .console import out as stdout
from .estimate_tables import build_links_table, build_rounds_table, sum_tree
from .options import ConfigFile, Overrides, load_with_options

Message = tuple[LedgerLine, BytesRange, str]


def estimate(
    config: ConfigFile,
    sites: Annotated[int | None, typer.Option(help="Number of sites; default: as configured")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training; default: as configured")] = None,
    subjects: Annotated[
        int | None,
        typer.Option(
            min=1, help="With privacy: training subjects of every site, where the data is not here to count them"
        ),
    ] = None,
    set_: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Count the scalars and bytes that a run will send, per round and in total, without training.

    The method runs with noise in place of trained weights, and every message is encoded and counted. Where the settings
    decide every message, the figures are those of the run's ledger. Where trained values decide what is sent, the last
    lines name the reason, and there are three figures: least and most, which no run exceeds, and a typical one.

    All figures hold for sites that answer every request at the first attempt. They are bytes of messages: the
    connections carry more (docs/wire-format.md).

    With federation.hubs, in the configuration or by --set, the bytes of each link of the tree follow: what the server
    and each hub send and receive, and what each site does (--json).

    With a privacy section, epsilon of the whole job is printed with each site's sampling rate, steps and noise. It does
    not depend on values of the data, only on the number of subjects.

    Examples:

        flare-sparse estimate app_configs/fedsparsify_paper.yaml --set method.sparsity=0.95 --json

        flare-sparse estimate app_configs/topk_ef_brain_age.yaml --sites 8 --rounds 100

        flare-sparse estimate app_configs/dp_morphometry_age.yaml --subjects 100 --json

        flare-sparse estimate app_configs/masked_brain_age.yaml --set 'federation.hubs={north: {sites: [site-1]}}'
    """
    resolved = load_with_options(config, sites, rounds, None, set_)
    figures = compute_figures(resolved, config)
    if resolved.privacy is not None:
        figures |= forecast_privacy(resolved, config, subjects)
    if as_json:
        typer.echo(json.dumps(figures, indent=2))
    else:
        _show(stdout, figures)


def compute_figures(config: RunConfig, file: Path) -> dict[str, Any]:
    """Return the figures of a dry run.

    Args:
        config: the configuration.
        file: where it was read from; a user task's module lies beside it.

    Raises:
        ConfigError: neither the configuration nor the data gives the number of sites.
    """
    assembly = assemble(config, load_task(config, file.parent))
    sites = build_dry_sites(config, assembly)
    outcome, ledger = dry_run(
        assembly.method,
        assembly.weights,
        sites,
        config.wire.values,
        encrypted=config.encrypted,
        sum_rules=config.sum_rules,
        hubs=config.hubs,
    )
    # Without the collections of hubs, which carry these messages: with hubs and without, a run has the same messages.
    own = Ledger([line for line in ledger.lines if line.site in sites])
    messages = list(bound_messages(assembly.method, own.lines, sites))
    by_attempt = [list(group) for _, group in groupby(messages, key=lambda message: message[0].sequence)]
    rounds = [
        {
            "round": record.round,
            "kind": record.kind,
            "bytes_down": sum(line.payload_bytes for line, _, _ in attempt if line.direction == "down"),
            "bytes_up": sum(line.payload_bytes for line, _, _ in attempt if line.direction == "up"),
            "dense_bytes": sum(line.dense_bytes for line, _, _ in attempt),
            "sparsity": record.sparsity,
            "bytes": _sum_ranges(attempt),
        }
        for record, attempt in zip(outcome.rounds, by_attempt, strict=True)
    ]
    training = [line for line in own.lines if line.kind == "train" and line.content in ("weights", "delta")]
    total, stopping = _sum_ranges(messages), config.federation.early_stopping
    reasons = list(dict.fromkeys(reason for _, _, reason in messages if reason))
    if stopping is not None and stopping.patience + 1 < config.method.config.rounds:
        # The first model is the best one of a run that ends as early as possible; the last request evaluates its end.
        shortest = [
            message
            for record, attempt in zip(outcome.rounds, by_attempt, strict=True)
            if record.round <= stopping.patience + 1 or attempt is by_attempt[-1]
            for message in attempt
        ]
        least = _sum_ranges(shortest)
        total = {name: {**sums, "least": least[name]["least"]} for name, sums in total.items()}
        reasons.append("validation examples decide how many rounds the run has (federation.early_stopping)")
    return {
        "name": config.name,
        "method": config.method.name,
        "sites": len(sites),
        "rounds": config.method.config.rounds,
        "parameters": assembly.layout.size,
        "paper_scalars": assembly.method.count_paper_scalars(len(sites)),
        "scalars": sum(line.scalars_sent for line in training),
        "dense_scalars": sum(line.scalars_total for line in training),
        "exact": all(size.is_exact for _, size, _ in messages) and total["total"]["least"] == total["total"]["most"],
        "depends_on": reasons,
        "bytes": total,
        "traffic": sum_traffic(own),
        "per_round": rounds,
        **(sum_tree(ledger.lines, config.hubs, sites) if config.hubs else {}),
    }


def forecast_privacy(config: RunConfig, file: Path, subjects: int | None) -> dict[str, Any]:
    """Return ``epsilon`` of a job, the largest of all sites, and the figures of every site.

    Where the number of subjects is not known, epsilon is the job's budget, which every site keeps.

    Args:
        config: the configuration, with a privacy section.
        file: where it was read from.
        subjects: number of training subjects of every site; None: counted in the data, where it is here.
    """
    assert config.privacy is not None, "asked for with a privacy section only"
    assembly = assemble(config, load_task(config, file.parent))
    counts = _count_subjects(config, assembly.task) if subjects is None else {"every site": subjects}
    sites = {
        name: Forecast.compute(config.privacy, plan_sampling(assembly.method, count)).to_dict()
        for name, count in counts.items()
    }
    largest = max((site["epsilon"] for site in sites.values()), default=config.privacy.epsilon)
    return {"epsilon": largest, "privacy": {**config.privacy.model_dump(mode="json"), "sites": sites}}


def _count_subjects(config: RunConfig, task: Task) -> dict[str, int]:
    """Return the number of training subjects by site, as far as the settings or the index of the data say it.

    Examples of a data set count as subjects of their own; ``flare-sparse check`` reads the data and groups them.
    """
    simulator, split = config.simulator, config.task.config.split
    if config.federation.examples:
        return dict(config.federation.examples)
    if simulator is None or simulator.data.partition is None or simulator.data.path is None:
        return {}
    path, partition = simulator.data.path, simulator.data.partition
    if simulator.data.has_path_per_site or partition.name not in PARTITIONERS or not path.exists():
        return {}
    ids = PARTITIONERS[partition.name](task.cohort(path), simulator.sites, **partition.config.model_dump())
    return {name: len(split.assign(own, config.seed).train) for name, own in sorted(ids.items())}


def build_dry_sites(config: RunConfig, assembly: Assembly) -> dict[str, DrySite]:
    """Return a dry site for each site of a run, with the site's own settings.

    Raises:
        ConfigError: neither the configuration nor the data gives the number of sites.
    """
    settings = config.simulator.site_settings if config.simulator else {}
    names = name_sites(config, assembly.task, [*assembly.method.named_sites, *settings])
    sites = {name: DrySite(name, assembly.layout, config.seed) for name in names}
    for name, site in sites.items():
        data = SiteData(name, Path(), methods=settings.get(name, {}))
        site.site_settings = validate_site_settings(assembly.method, data)
    return sites


def name_sites(config: RunConfig, task: Task, named: Sequence[str] = ()) -> list[str]:
    """Return the names of the sites of a run; methods sample sites by name, so that names decide bytes.

    Natural sites are read from the index of the data. Without the data, the sites that the settings name come first,
    then ``site-1``, ``site-2``, ... up to the configured number.

    Args:
        config: the configuration.
        task: reads the index of the data.
        named: names of sites in the settings.

    Raises:
        ConfigError: neither the configuration nor the data gives the number of sites.
    """
    simulator = config.simulator
    count = simulator.sites if simulator else None
    if simulator is not None and simulator.data.partition is not None and simulator.data.partition.name == "natural":
        path, settings = simulator.data.path, simulator.data.partition.config.model_dump()
        if path is not None and path.exists():
            return sorted(PARTITIONERS["natural"](task.cohort(path), count, **settings))
        if count is None:
            raise ConfigError(
                f"the sites are those that the data names, and there is no data at {path}; add --sites N, or the path: "
                "--set simulator.data.path=FILE"
            )
        numbered = (f"site-{i}" for i in range(1, count + len(named) + 1))
        return sorted(list(dict.fromkeys([*named, *numbered]))[:count])
    if count is None:
        raise ConfigError("the configuration does not give the number of sites; add --sites N")
    return sorted(f"site-{i}" for i in range(1, count + 1))


def _sum_ranges(messages: Iterable[Message]) -> dict[str, dict[str, int]]:
    """Return least, typical and most bytes by direction and in total."""
    sums = {"down": BytesRange(), "up": BytesRange()}
    for line, size, _ in messages:
        sums[line.direction] += size
    sums["total"] = sums["down"] + sums["up"]
    return {name: {"least": r.least, "typical": r.typical, "most": r.most} for name, r in sums.items()}


def _show(console: Console, figures: dict[str, Any]) -> None:
    console.print(
        f"{figures['name']}: {figures['method']}, {figures['parameters']:,} parameters, {figures['sites']} sites, "
        f"{figures['rounds']} rounds"
    )
    console.print(build_rounds_table(figures))
    total = figures["bytes"]["total"]
    dense = sum(figures["traffic"][direction]["dense_bytes"] for direction in ("down", "up"))
    sent = total["typical"]
    console.print(
        f"total: {format_bytes(sent)}" + (f"; {compare_with_dense(sent, dense)}" if dense else ""), markup=False
    )
    console.print(f"training messages carry {figures['scalars']:,} of {figures['dense_scalars']:,} scalars")
    if figures["paper_scalars"] is not None:
        console.print(f"by the paper's counting rule: {figures['paper_scalars']:,} scalars")
    if not figures["depends_on"] and not figures["exact"]:
        console.print("up to 0.1 % more or less: ciphertexts are compressed, and no two are equal")
    elif not figures["exact"]:
        console.print(
            f"the bytes depend on the data: at least {format_bytes(total['least'])}, typically {format_bytes(sent)}, "
            f"at most {format_bytes(total['most'])}"
        )
        for reason in figures["depends_on"]:
            console.print(f"  {reason}", markup=False)
    else:
        console.print("exact: the settings decide every message, so that a run's ledger has the same bytes")
    if "links" in figures:
        console.print(build_links_table(figures))
        console.print("a collection of a hub also has the metrics of its sites as text, which are not counted here")
    if "epsilon" in figures:
        _show_privacy(console, figures)


def _show_privacy(console: Console, figures: dict[str, Any]) -> None:
    privacy, epsilon = figures["privacy"], figures["epsilon"]
    if epsilon is None:
        console.print("privacy: epsilon depends on the number of subjects; add --subjects N")
        return
    console.print(f"privacy: epsilon {epsilon:.2f} at delta {privacy['delta']:g}, of a subject over the whole job")
    for name, site in privacy["sites"].items():
        console.print(
            f"  {name}: {site['subjects']} subjects, sampling rate {site['sample_rate']:.3g}, {site['steps']} steps, "
            f"noise {site['noise_multiplier']:.2f} * clip, epsilon {site['epsilon']:.2f}",
            markup=False,
        )
