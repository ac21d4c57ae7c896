"""Withdrawal from a finished run: a subject or a site leaves, and the run is made again without it.

Withdrawal of subjects or a site from a finished run: which rounds they touched, and what is left of them on disk.

A committed round depends on what the sites sent in it and before. So the last commit before a site's first contribution
is also that of a run without this site's data, and a run that resumes from it has the bits of one that never had them.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..config.needs import WITHDRAWAL, find_conflicts
from ..config.schema import RunConfig
from ..config.study import Study
from ..config.withdrawals import Withdrawals
from ..core.checkpoint.store import Store
from ..core.errors import ConfigError, suggest
from ..core.observer import SILENT, Observer
from ..core.seeds import limit_threads
from ..results.runs.continuation import FINAL, copy_checkpoints
from ..results.runs.folder import CHECKPOINTS, ERRORS, RunFolder
from ..results.runs.model_files import delete_models, find_site_models
from ..results.runs.predictions import PREDICTIONS_FILE
from ..results.runs.received import explain_damage
from ..results.runs.results import AUDIT_FOLDER, EVALUATIONS
from ..rounds.endpoints.events import SERVER
from ..tasks.task import Examples, SiteData, load_examples
from .deployment import Env
from .run import Run
from .start import launch

SITE_FILES = "sites"
"""Folder with the site files of a simulation, which name identifiers."""
REPORT = "report"
"""Folder of the default report, which may show predictions and pictures of subjects."""
Line = Mapping[str, Any]
"""A line of ``rounds.jsonl``."""


def list_touched_rounds(lines: Sequence[Line], site: str) -> list[int]:
    """Return the rounds to which a site sent values or metrics."""
    return [line["round"] for line in lines if site in _list_senders(line)]


def find_start(lines: Sequence[Line], sites: Iterable[str], config: RunConfig, *, leaves: bool) -> int:
    """Return how many of the first lines are also those of a run without the data.

    Args:
        lines: of ``rounds.jsonl``.
        sites: sites whose data changes.
        config: settings of the run.
        leaves: the sites are gone; otherwise some of their subjects are.
    """
    # Noise comes from a secret that the new run does not have. A site that is there changes the sample of sites of a
    # round, also of one in which it is not drawn.
    if config.privacy is not None or (leaves and config.method.config.participation < 1):
        return 0
    names = set(sites)
    return next((i for i, line in enumerate(lines) if names & _list_traces(line, leaves=leaves)), len(lines))


def find_commit(folder: Path, lines: Sequence[Line]) -> Line | None:
    """Return the newest one among some lines whose checkpoints are all in a folder; None without one.

    Args:
        folder: folder of the checkpoints of one run, with a folder for each end.
        lines: the first lines of ``rounds.jsonl``.
    """
    committed = set(Store(folder / SERVER, {}).list_intact())
    for count in range(len(lines), 0, -1):
        line = lines[count - 1]
        if line["sequence"] in committed and _has_sites(folder, lines[:count]):
            return line
    return None


def remove_traces(run: Path, sites: Iterable[str]) -> list[str]:
    """Delete what a result folder holds of single sites and subjects, and return the names of what was there.

    Checkpoints, recorded updates, predictions and pictures of all sites go: those of the others were computed together
    with the data, or lie in one file with it. Models, record and metrics stay.

    Args:
        run: result folder.
        sites: sites whose data changes; their own models are deleted.
    """
    folders = (CHECKPOINTS, FINAL, AUDIT_FOLDER, ERRORS, SITE_FILES, REPORT)
    removed = [name for name in folders if (run / name).is_dir()]
    for name in removed:
        shutil.rmtree(run / name)
    models = find_site_models(run)
    files = [run / EVALUATIONS / PREDICTIONS_FILE, *(models[site] for site in sites if site in models)]
    for file in [file for file in files if file.is_file()]:
        file.unlink()
        removed.append(str(file.relative_to(run)))
    return removed


def _list_senders(line: Line) -> set[str]:
    return {*line["sites_contributed"], *line["abstained"]}


def _list_traces(line: Line, *, leaves: bool) -> set[str]:
    """Return the sites on which the state after a round may depend."""
    if not leaves:
        return _list_senders(line)
    return {*line["sites_asked"], *line["quarantined"], *line["excluded"]}


def _has_sites(folder: Path, lines: Sequence[Line]) -> bool:
    """Return whether each site has the checkpoint of its last contribution among some lines."""
    last = {site: line["sequence"] for line in lines for site in _list_senders(line)}
    end = lines[-1]["sequence"] + 1
    return all((Store(folder / site, {}).find_newest(end) or 0) >= number for site, number in last.items())


@dataclass(frozen=True)
class Touched:
    """What a withdrawal means for a run.

    Attributes:
        rounds: rounds to which each affected site sent values or metrics; the last one is the final evaluation.
        found: number of withdrawn subjects, or of their examples, in the parts of the split, by site.
        moved: number of other examples that change their part of the split, by site.
        start: line of the committed round from which the run is made again; None: from the start.
        id: column of the table with the identifiers of the subjects.
    """

    rounds: dict[str, list[int]]
    found: dict[str, dict[str, int]] = field(default_factory=dict)
    moved: dict[str, int] = field(default_factory=dict)
    start: Line | None = None
    id: str | None = None


@explain_damage
def trace_withdrawal(run: Run, gone: Withdrawals) -> Touched:
    """Return which rounds of a finished run contain the data of subjects or sites, and where to begin again.

    Args:
        run: the run.
        gone: what withdraws now.

    Raises:
        ConfigError: the sites' data is not on this machine, there is no such site or subject, or the package does not
            know which examples a script reads.
        DataError: the data of a site cannot be loaded.
    """
    study, lines = run.study, run.rounds
    config = study.config
    sites = {} if config.simulator is None else study.prepare_sites(run.path, run.observer)
    recorded = set(run.summary["final"]["sites"])
    if config.simulator is None or not recorded <= set(sites):
        raise ConfigError(
            f"{run.path}: the data of its sites is not on this machine. At the site: flare-sparse site withdraw KIT "
            "FILE; a site that leaves is taken out of the federation. Then submit the job again, with "
            "another seed if the server still has its checkpoints (docs/withdrawal.md)"
        )
    if gone.subjects and (conflicts := find_conflicts(config, features=[WITHDRAWAL])):
        raise ConfigError("; ".join(conflicts))
    if unknown := sorted(gone.sites - set(sites)):
        raise ConfigError(
            f"{unknown[0]}: no such file, nor such a site in {run.path}.{suggest(unknown[0], sites)} The sites "
            f"are {', '.join(sites)}"
        )
    with limit_threads(config.torch_threads):
        gone = replace(gone, id=gone.id or Withdrawals.read(run.path).id or study.load_task().get_person_column())
        found, moved = _find_subjects(study, sites, gone)
    affected = sorted({*gone.sites, *found})
    first = find_start(lines, affected, config, leaves=bool(gone.sites))
    commit = find_commit(run.path / FINAL / f"{config.name}-{study.run_id}", lines[:first])
    rounds = {site: list_touched_rounds(lines, site) for site in affected}
    return Touched(rounds, found, moved, commit, gone.id)


@explain_damage
def withdraw(
    run: Run,
    gone: Withdrawals,
    touched: Touched,
    *,
    out: Path | None = None,
    env: Env = "local",
    deletes_models: bool = False,
    observer: Observer = SILENT,
) -> Run:
    """Remove what a result folder holds of withdrawn data, make the run again without it, and return the new run.

    Args:
        run: the finished run. Its record says afterwards that its model must not be used.
        gone: what withdraws now.
        touched: of :func:`trace_withdrawal`.
        out: result folder of the new run; None: beside the old one, with ``-without`` after its name.
        env: environment of the new run, except ``prod``.
        deletes_models: delete the models of the old run, too.
        observer: hears of the rounds.

    Raises:
        ConfigError: the new folder holds a run.
        FlareSparseError: the new run failed; it continues with ``flare-sparse run OUT/config.yaml
            --out OUT --start last``.
    """
    earlier, study = Withdrawals.read(run.path), run.study
    everyone = replace(gone, id=touched.id).merge(earlier)
    folder = RunFolder(out or run.path.with_name(f"{run.path.name}-without"), resume=touched.start is not None)
    if folder.path.resolve() == run.path.resolve() or folder.is_finished or folder.has_checkpoint:
        raise ConfigError(f"{folder.path}: holds a run already; withdraw from that one, or remove it first")
    with folder.claim():
        source = f"after round {touched.start['round']}" if touched.start else "the start"
        replace(everyone, note=f"This model was trained without them, from {source}.").write(folder.path)
        if touched.start is not None:
            checkpoints = run.path / FINAL / f"{study.config.name}-{study.run_id}"
            copy_checkpoints(
                checkpoints,
                lambda end: study.open_checkpoints(folder.path / CHECKPOINTS, end),
                below=touched.start["sequence"] + 1,
            )
        remove_traces(run.path, touched.rounds)
        note = f"The model in this folder has learned from them and must not be used; see {folder.path.name}."
        replace(everyone, note=note).write(run.path)
        if deletes_models:
            delete_models(run.path)
        run.write_card()
        return launch(env, study, folder.prepare(), observer)


def _find_subjects(
    study: Study, sites: Mapping[str, SiteData], gone: Withdrawals
) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Return how many examples of some subjects each part of a site's split has, and how many others change parts.

    Raises:
        ConfigError: no site has data of one of the subjects.
        DataError: the data does not say whose an example is.
    """
    found, moved, unknown = {}, {}, set(gone.subjects)
    for name, data in sites.items() if gone.subjects else ():
        before = _find_parts(load_examples(study.load_task(), data, study.config.seed))
        without = gone.merge(Withdrawals(data.withdrawn)).open(data)
        after = _find_parts(load_examples(study.load_task(), without, study.config.seed))
        # Names of the task's examples are the only ones of a file that is no table of identifiers.
        unknown -= without.withdrawn if without.people is not None else {*before}
        if leaving := before.keys() - after.keys():
            parts = [before[example] for example in leaving]
            found[name] = {part: parts.count(part) for part in sorted(set(parts))}
            moved[name] = sum(before[example] != part for example, part in after.items())
    if unknown:
        raise ConfigError(
            f"{len(unknown)} of {len(gone.subjects)} identifiers are at no site of this run (first: "
            f"{min(unknown)!r}); nothing was changed. Write one identifier a line, as in the data"
        )
    return found, moved


def _find_parts(examples: Examples) -> dict[str, str]:
    """Return the part of the split of each example, by identifier."""
    parts = {"training": examples.train_ids, "validation": examples.validation_ids, "testing": examples.test_ids}
    return {name: part for part, names in parts.items() for name in names}
