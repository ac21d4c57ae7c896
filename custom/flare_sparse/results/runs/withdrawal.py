"""Withdrawal of subjects or a site from a finished run: which rounds they touched, and what is left of them on disk.

A committed round depends on what the sites sent in it and before. So the last commit before a site's first contribution
is also that of a run without this site's data, and a run that resumes from it has the bits of one that never had them.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...config.schema import RunConfig
from ...core.checkpoint.store import Store
from ...rounds.endpoints.server import SERVER
from .continuation import FINAL
from .folder import CHECKPOINTS, ERRORS
from .model_files import list_site_models
from .predictions import PICTURES_FILE, PREDICTIONS_FILE
from .record import UPDATES
from .results import AUDIT_FOLDER, EVALUATIONS

SITE_FILES = "sites"
"""Folder with the site files of a simulation, which name identifiers."""
REPORT = "report"
"""Folder of the default report, which may show predictions and pictures of subjects."""
Line = Mapping[str, Any]
"""A line of ``rounds.jsonl``."""


@dataclass(frozen=True)
class Commit:
    """A committed round that a run without the data can start from.

    Attributes:
        round: the round.
        sequence: number of its checkpoints.
    """

    round: int
    sequence: int


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
    # Ciphertexts need the keys that wrote them, and noise comes from a secret that the new run does not have. A site
    # that is there changes the sample of sites of a round, also of one in which it is not drawn.
    if config.encrypted or config.privacy is not None or (leaves and config.method.config.participation < 1):
        return 0
    names = set(sites)
    return next((i for i, line in enumerate(lines) if names & _list_traces(line, leaves=leaves)), len(lines))


def find_commit(folder: Path, lines: Sequence[Line]) -> Commit | None:
    """Return the newest commit among some lines whose checkpoints are all in a folder; None without one.

    Args:
        folder: folder of the checkpoints of one run, with a folder for each end.
        lines: the first lines of ``rounds.jsonl``.
    """
    committed = set(Store(folder / SERVER, {}).list_intact())
    for count in range(len(lines), 0, -1):
        line = lines[count - 1]
        if line["sequence"] in committed and _has_sites(folder, lines[:count]):
            return Commit(line["round"], line["sequence"])
    return None


def remove_traces(run: Path, sites: Iterable[str]) -> list[str]:
    """Delete what a result folder holds of single sites and subjects, and return the names of what was there.

    Checkpoints, recorded updates, predictions and pictures of all sites go: those of the others were computed together
    with the data, or lie in one file with it. Models, record and metrics stay.

    Args:
        run: result folder.
        sites: sites whose data changes; their own models are deleted.
    """
    folders = (CHECKPOINTS, FINAL, UPDATES, AUDIT_FOLDER, ERRORS, SITE_FILES, REPORT)
    removed = [name for name in folders if (run / name).is_dir()]
    for name in removed:
        shutil.rmtree(run / name)
    models = list_site_models(run)
    files = [run / EVALUATIONS / name for name in (PREDICTIONS_FILE, PICTURES_FILE)]
    files += [models[site] for site in sites if site in models]
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
