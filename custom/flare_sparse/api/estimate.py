"""Estimate of a study: the bytes and scalars that a run will send, without data or training."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.assemble import Assembly, build_transport, plan_sampling, validate_site_settings
from ..config.schema import RunConfig
from ..config.study import Study
from ..core.errors import ConfigError, FlareSparseError
from ..privacy.dp.forecast import Forecast
from ..results.runs.record import sum_traffic
from ..rounds.local.dry_run import DryTrainer, dry_run
from ..tasks.data.partition import NaturalPartition, Partitioner, partition_cohort
from ..tasks.task import SiteData, Task
from ..training import Site
from .memory import measure_step


def compute_figures(study: Study, *, measures: bool = False, rate: float | None = None) -> dict[str, Any]:
    """Return the figures of a dry run: of a run whose sites answer every request at the first attempt.

    Noise stands for trained values; where these decide which entries travel, a run may send more or less.

    Args:
        study: the study.
        measures: add ``memory``, see :func:`.memory.measure_step`.
        rate: bits per second of a site's link; adds ``seconds_on_link`` of the busiest site's messages.

    Raises:
        ConfigError: neither the configuration nor the data gives the number of sites.
    """
    config, assembly = study.config, study.assembly
    sites = build_dry_sites(config, assembly)
    outcome, ledger = dry_run(assembly.method, assembly.weights, sites, build_transport(config))
    rounds = [
        {
            "round": record.round,
            "kind": record.kind,
            "bytes_down": record.bytes_down,
            "bytes_up": record.bytes_up,
            "dense_bytes": record.dense_bytes,
            "sparsity": record.sparsity,
        }
        for record in outcome.rounds
    ]
    training = [line for line in ledger.lines if line.kind == "train" and line.content in ("weights", "delta")]
    traffic = sum_traffic(ledger)
    sent = {direction: int(sums["payload_bytes"]) for direction, sums in traffic.items()}
    by_site: Counter[str] = Counter()
    for line in ledger.lines:
        by_site[line.site] += line.payload_bytes
    busiest = max(by_site.values(), default=0)
    figures = {
        "name": config.name,
        "method": config.method.name,
        "sites": len(sites),
        "rounds": config.method.config.rounds,
        "parameters": assembly.layout.size,
        "paper_scalars": assembly.method.count_paper_scalars(len(sites)),
        "scalars": sum(line.scalars_sent for line in training),
        "dense_scalars": sum(line.scalars_total for line in training),
        "bytes": {**sent, "total": sum(sent.values())},
        "busiest_site_bytes": busiest,
        "traffic": traffic,
        "per_round": rounds,
    }
    if measures:
        figures["memory"] = measure_step(study)
    return figures if rate is None else {**figures, "seconds_on_link": 8 * busiest / rate}


def compare_methods(
    file: str | Path, overrides: Sequence[str], names: Sequence[str], **asked: Any
) -> dict[str, dict[str, Any] | FlareSparseError]:
    """Return the figures of a study with each of some methods, by name; for a method that does not fit, its error.

    Settings that the file's method has and another one lacks are left out for that one. ``asked`` is what
    :func:`compute_figures` takes beside the study.
    """
    figures: dict[str, dict[str, Any] | FlareSparseError] = {}
    for name in names:
        try:
            figures[name] = compute_figures(Study.load(file, [*overrides, f"method.name={name}"]), **asked)
        except FlareSparseError as error:
            figures[name] = error
    return figures


def parse_link(text: str) -> float:
    """Return the bits per second of a link.

    >>> parse_link("10mbit"), parse_link("2.5 Gbit/s")
    (10000000.0, 2500000000.0)

    Raises:
        ConfigError: it is not a number of kbit, mbit or gbit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg])bit(?:/s)?", text.strip().lower())
    if match is None or not float(match[1]):
        raise ConfigError(f"--link {text!r}: expected a rate such as 10mbit, 100mbit or 1gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def forecast_privacy(study: Study, subjects: int | None) -> dict[str, Any]:
    """Return ``epsilon`` of a job, the largest of all sites, and the figures of every site.

    Where the number of subjects is not known, epsilon is the job's budget, which every site keeps.

    Args:
        study: the study, with a privacy section.
        subjects: number of training subjects of every site; None: counted in the data, where it is here.
    """
    config, assembly = study.config, study.assembly
    assert config.privacy is not None, "asked for with a privacy section only"
    if subjects is not None and config.privacy.unit == "record":
        raise ConfigError("--subjects: with unit: record the script's loader decides about the steps, not the settings")
    counts = _count_subjects(config, assembly.task) if subjects is None else {"every site": subjects}
    sites = {
        name: Forecast.compute(config.privacy, plan_sampling(assembly.method, count)).to_dict()
        for name, count in counts.items()
    }
    largest = max((site["epsilon"] for site in sites.values()), default=config.privacy.epsilon)
    return {"epsilon": largest, "privacy": {**config.privacy.model_dump(mode="json"), "sites": sites}}


def _count_subjects(config: RunConfig, task: Task) -> dict[str, int]:
    """Return the number of training subjects by site, as far as the index of the data or the settings say it.

    Where the data is not here, agreed numbers of examples stand in; fewer subjects have a larger epsilon.
    """
    simulator, split, agreed = config.simulator, config.task.config.split, dict(config.federation.examples)
    if simulator is None or simulator.data.partition is None or simulator.data.path is None:
        return agreed
    path, partition = simulator.data.path, simulator.data.partition.config
    if simulator.data.has_path_per_site or not isinstance(partition, Partitioner) or not path.exists():
        return agreed
    cohort = task.cohort(path)
    ids = partition_cohort(partition, cohort, simulator.sites)
    subject_of = dict(zip(cohort.ids, cohort.subjects or cohort.ids, strict=True))
    subjects = {name: {subject_of[example] for example in own} for name, own in sorted(ids.items())}
    return {name: len(split.assign(own, config.seed).train) for name, own in subjects.items()}


def build_dry_sites(config: RunConfig, assembly: Assembly) -> dict[str, Site]:
    """Return a dry site for each site of a run, with the site's own settings.

    Raises:
        ConfigError: neither the configuration nor the data gives the number of sites.
    """
    settings = config.simulator.site_settings if config.simulator else {}
    names = name_sites(config, assembly.task, [*assembly.method.named_sites, *settings])
    sites = {}
    for name in names:
        own = validate_site_settings(assembly.method, SiteData(name, Path(), methods=settings.get(name, {})))
        sites[name] = Site(name, DryTrainer(name, assembly.layout, config.seed), own)
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
    partition = simulator.data.partition.config if simulator and simulator.data.partition else None
    if simulator is not None and isinstance(partition, NaturalPartition):
        path = simulator.data.path
        if path is not None and path.exists():
            return sorted(partition_cohort(partition, task.cohort(path), count))
        if count is None:
            raise ConfigError(
                f"the sites are those that the data names, and there is no data at {path}; add --set "
                "simulator.sites=N, or the path: --set simulator.data.path=FILE"
            )
        numbered = (f"site-{i}" for i in range(1, count + len(named) + 1))
        return sorted(list(dict.fromkeys([*named, *numbered]))[:count])
    if count is None:
        raise ConfigError("the configuration does not give the number of sites; add --set simulator.sites=N")
    return sorted(f"site-{i}" for i in range(1, count + 1))
