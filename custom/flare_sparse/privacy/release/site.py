"""The release of one site in one job: its record on disk, and what the job's messages say of people."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from ...cohorts.conditions import Term
from ...cohorts.split import SplitConfig
from ...cohorts.subgroups import EVERYONE, SUBJECTS, parse_subgroup, split_metric
from ...core.checkpoint.writing import write_json
from ...core.errors import PolicyRefusal
from .record import FOLD, ReleaseRecord, Rule, build_folds, count_groups, count_people, label_group, round_metric

RELEASE_FOLDER = "flare_sparse_release"
"""Folder in a site's startup kit with the secret and the record of its release."""


@dataclass(frozen=True)
class Numbers:
    """Numbers of people that a job's messages state: sums over cells, whichever rows the job used.

    Attributes:
        train, test, validation: of the parts of the split.
        groups: of the test subjects by subgroup, such as ``sex=F``.
    """

    train: int
    test: int
    validation: int
    groups: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def count(cls, record: ReleaseRecord, split: SplitConfig, subgroups: Sequence[str]) -> Numbers:
        """Return the numbers of a split whose parts are folds of the record, or shares where it has no folds."""
        if FOLD not in record.columns:
            everyone, share = count_people(record), 1 / split.folds if split.folds else split.test
            return cls(everyone, max(round(everyone * share), 1), round(everyone * split.validation))
        parts = [
            Term(FOLD, frozenset(names), keeps=True) for names in list_folds(split, count_groups(record.columns[FOLD]))
        ]
        train, test, validation = (count_people(record, [part]) if part.values else 0 for part in parts)
        groups: dict[str, int] = {}
        for column in (parse_subgroup(text)[0] for text in subgroups):
            for number in range(count_groups(record.columns[column]) if column in record.columns else 0):
                label = f"{column}={label_group(record.columns[column], number)}"
                groups[label] = sum(
                    cell.count
                    for key, cell in record.cells.items()
                    if f"{column}={number}" in key.split("/") and _get_fold(key) in parts[1].values
                )
        return cls(train, test, validation, {**groups, EVERYONE: test} if groups else {})


@dataclass(frozen=True)
class SiteRelease:
    """What a site's guards need to let numbers about people leave.

    Attributes:
        folder: the site's folder of the release.
        rule: minimum and rounding.
        numbers: what messages state.
        task: digest of the settings that its metrics depend on.
    """

    folder: Path
    rule: Rule
    numbers: Numbers
    task: str

    def state_counts(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics with the released numbers of subjects in place of the exact ones of subgroups."""
        groups = {name: part[1] for name in metrics if (part := split_metric(name)) and part[0] == SUBJECTS}
        return {**metrics, **{name: float(self.numbers.groups.get(group, 0)) for name, group in groups.items()}}

    def publish_metrics(self, metrics: Mapping[str, float], people: Mapping[str, int], model: str) -> dict[str, float]:
        """Return metrics on the grid; those of a model that left before leave again.

        Args:
            metrics: the metrics, whose counts are released numbers.
            people: number of subjects by metric, without those of subgroups.
            model: digest of the model.

        Raises:
            PolicyRefusal: the record cannot be read or written.
        """
        coarse = {name: self._round(name, value, people.get(name, 0)) for name, value in metrics.items()}
        key, released = f"{self.task}/{model}", dict[str, float]()

        def add(record: ReleaseRecord | None) -> ReleaseRecord:
            record = record or ReleaseRecord()
            known = record.metrics.get(key, {})
            released.update({name: known.get(name, value) for name, value in coarse.items()})
            return record.model_copy(update={"metrics": {**record.metrics, key: known | released}})

        update_record(self.folder, add)
        # By name: subgroups come in the order of their exact counts.
        return dict(sorted(released.items()))

    def _round(self, name: str, value: float, people: int) -> float:
        metric, group = split_metric(name) or (name, "")
        if metric == SUBJECTS or (not group and not people):
            return value
        return round_metric(self.rule, value, self.numbers.groups.get(group, 0) if group else people)


def compute_step(rule: Rule, deviation: float, people: int) -> float:
    """Return the step of the grid of a figure in the unit of a column: the minimum's share of its deviation.

    >>> compute_step(Rule(10), 8.0, 80), compute_step(Rule(10), 0.0, 80)
    (1.0, 0.0)
    """
    share = deviation * rule.minimum / max(people, rule.minimum)
    return 2.0 ** math.ceil(math.log2(share)) if share > 0 else 0.0


def list_folds(split: SplitConfig, folds: int) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the folds of training, test and validation.

    Raises:
        PolicyRefusal: a part of the split is no whole number of the site's folds.
    """
    start, width = ((split.fold - 1) / split.folds, 1 / split.folds) if split.folds else (0.0, split.test)
    ends = [folds * edge for edge in (start, start + width, start + width + split.validation)]
    if any(abs(end - round(end)) > 1e-9 for end in ends):
        raise PolicyRefusal(
            f"this site's policy: release: task.split cuts the {folds} folds that this site has; choose test and "
            f"validation among multiples of 1/{folds}, and a number of folds that divides {folds}"
        )
    first, last, end = (round(edge) for edge in ends)
    parts = [frozenset(str(number % folds + 1) for number in range(*pair)) for pair in ((first, last), (last, end))]
    return frozenset(map(str, range(1, folds + 1))) - parts[0] - parts[1], parts[0], parts[1]


def update_record(folder: Path, change: Callable[[ReleaseRecord | None], ReleaseRecord]) -> ReleaseRecord:
    """Change the record in a site's folder of the release, which is locked meanwhile, and return it.

    Args:
        folder: created if missing, for the owner alone.
        change: returns the new record from the old one; None: there is none.

    Raises:
        PolicyRefusal: it cannot be read or written; then no number about people leaves.
    """
    file = folder / "release.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = ReleaseRecord.model_validate(json.loads(file.read_text())) if file.is_file() else None
            record = change(known)
            if record != known:
                file.touch(mode=0o600)
                write_json(file, record.model_dump())
                file.chmod(0o600)
            return record
    except (OSError, ValueError, ValidationError) as error:
        raise PolicyRefusal(f"{file}: the release cannot be read or written: {error}") from error


def _get_fold(key: str) -> str:
    """Return the fold of a cell's key, as a text from 1."""
    number = next(part.removeprefix(f"{FOLD}=") for part in key.split("/") if part.startswith(f"{FOLD}="))
    return build_folds(int(number) + 1)[int(number)][0]  # type: ignore[index]
