"""A site's declaration of its people, written once before any job, and the release that it opens for each job."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, ValidationError

from ..core.errors import ConfigError, DataError, PolicyRefusal
from ..core.settings import Settings
from ..privacy.dp.secret import derive_key, read_secret
from ..privacy.release import (
    FOLD,
    Columns,
    Groups,
    Numbers,
    People,
    ReleaseRecord,
    Rule,
    SiteRelease,
    assign_fold,
    build_folds,
    declare,
    find_group,
    is_listed,
    is_union,
    label_group,
    list_folds,
    renew,
    round_count,
    update_record,
)
from ..tasks.data.absence import find_absent_rows
from ..tasks.data.tables import Table, read_table
from ..tasks.task import Examples, SiteData, Task
from .yaml_files import read_content

PEOPLE_FILE = "flare_sparse_people.yaml"
"""Name of the declaration's file in the ``local`` folder of the site's startup kit."""

_MOST_LABELS = 8
"""A column with more different values is one of numbers, or free text."""


class Declaration(Settings):
    """What a site declares of its people: nothing of it comes from a job."""

    id: str
    """column with the identifier of a person"""
    table: Path | None = None
    """table of the people, relative to the file; default: the site's data"""
    folds: int = Field(5, ge=2, le=50)
    """number of folds, which the site's secret assigns"""
    columns: dict[str, Annotated[Groups, Field(min_length=1)]] = Field(default_factory=dict)
    """columns with groups: lists of texts, the last of which also holds every other value, or edges of numbers"""

    @property
    def all_columns(self) -> Columns:
        """The columns with that of the folds, which comes first."""
        return {FOLD: build_folds(self.folds), **self.columns}


@dataclass(frozen=True)
class ReleaseGate:
    """Opens the release of a site for a job; it decides on declaration and settings, never on rows.

    Args:
        local: folder with the declaration.
        folder: the site's folder of the release.
        rule: minimum and rounding.
        approved: choices of rows by jobs that a person at the site has approved.
    """

    local: Path
    folder: Path
    rule: Rule
    approved: tuple[str, ...] = ()

    @property
    def split_seed(self) -> int:
        """Seed of every split at this site, which no job knows."""
        return int.from_bytes(derive_key(self._secret, "split")[:8], "little")

    @property
    def _secret(self) -> bytes:
        return read_secret(self.folder / "secret")

    def bind(self, task: Task, data: SiteData) -> ReleaseRecord | None:
        """Check a job's choice of rows, and bind the task's split to the site's folds; return the record, if declared.

        Raises:
            PolicyRefusal: the job chooses rows that are no union of declared cells, or cuts a fold.
            DataError: the declaration or its table cannot be read.
        """
        declaration = read_declaration(self.local)
        record = None if declaration is None else self.open(declaration, data)
        terms = task.list_row_conditions()
        named = [[term.column, sorted(term.values), term.keeps] for term in terms]
        choice = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:12]
        if terms and choice not in self.approved and not is_union(record or ReleaseRecord(cells={}), terms):
            names = ", ".join(term.column for term in terms)
            raise PolicyRefusal(
                f"this site's policy: release: the job chooses rows by their values of {names}, which is no union "
                f"of declared cells; declare the columns, or approve this choice with approved_rows: [{choice}]"
            )
        person = task.get_person_column()
        if declaration is not None and person not in (None, declaration.id):
            raise PolicyRefusal(
                f"this site's policy: release: a person is one value of {declaration.id} here, and of {person} in the "
                "job; set task.id or task.group"
            )
        split = task.config.split.model_copy(update={"stable": True})
        if record is not None:
            list_folds(split, len(record.columns[FOLD]) if FOLD in record.columns else 1)
        # No threshold of the job's decides by exact counts of test subjects.
        task.config = task.config.model_copy(update={"split": split, "min_subgroup": 1})
        return record

    def open(self, declaration: Declaration, data: SiteData) -> ReleaseRecord:
        """Return the record of a declaration, renewed by who is in the table now.

        Raises:
            PolicyRefusal: even the folds are smaller than the minimum.
        """
        people = read_people(declaration, data, self.local, self.split_seed)

        def change(known: ReleaseRecord | None) -> ReleaseRecord:
            # A record without columns is that of a site which had declared nothing before.
            if known is not None and known.columns:
                return renew(known, self.rule, self._secret, people)
            found = declare(self.rule, self._secret, declaration.all_columns, people)
            if FOLD not in found.columns:
                raise PolicyRefusal(
                    f"this site's policy: release: {declaration.folds} folds would have fewer than {self.rule.minimum} "
                    f"people each; declare fewer folds, or remove {PEOPLE_FILE}: the site then has one cell"
                )
            return found

        return update_record(self.folder, change)

    def keep_answer(self, question: str, compute: Callable[[], str]) -> str:
        """Return the answer to a question about columns: the one that left before, or a new one, which is kept."""

        def add(record: ReleaseRecord | None, found: Mapping[str, str]) -> ReleaseRecord:
            record = record or ReleaseRecord()
            return record.model_copy(update={"answers": {**found, **record.answers}})

        # Opened before and after: the computation reads the record, too.
        known = update_record(self.folder, partial(add, found={})).answers
        found = {} if question in known else {question: compute()}
        return update_record(self.folder, partial(add, found=found)).answers[question]

    def round_count(self, name: str, count: int) -> int:
        """Return a released count of rows."""
        return round_count(self.rule, self._secret, name, count)

    def bound_count(self, name: str, count: int) -> int:
        """Return the least count that the released one says: whatever it decides tells nothing more of the rows."""
        return self.round_count(name, count) - self.rule.base

    def build(self, record: ReleaseRecord | None, task: Task, examples: Examples | None) -> SiteRelease:
        """Return the release of a job; a site that declares nothing keeps for life the number of its first job.

        Args:
            record: that of the declaration; None: there is none.
            task: the job's task.
            examples: the site's examples; None: a script reads them, and without a declaration its weight is the
                minimum.
        """
        config = task.config
        if examples is None:
            record = record or declare(self.rule, self._secret, {}, {})
        elif record is None:
            everyone = {str(number): dict[str, str]() for number in range(count_everyone(examples))}
            record = update_record(self.folder, lambda known: known or declare(self.rule, self._secret, {}, everyone))
        numbers = Numbers.count(record, config.split, config.subgroups)
        digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:16]
        return SiteRelease(self.folder, self.rule, numbers, digest)

    def label(self, record: ReleaseRecord | None, data: SiteData, examples: Examples) -> Examples:
        """Return examples whose subgroups are declared groups; none of a site that declares nothing."""
        declaration = read_declaration(self.local)
        if record is None or declaration is None:
            return replace(examples, test_subgroups={})
        people = read_people(declaration, data, self.local, self.split_seed)
        labels = {}
        for column in examples.test_subgroups:
            if column in record.columns:
                groups, names = record.columns[column], examples.test_subjects or examples.test_ids
                values = [people.get(name, {}).get(column, "") for name in names]
                labels[column] = [label_group(groups, find_group(groups, value)) for value in values]
        return replace(examples, test_subgroups=labels)


def count_everyone(examples: Examples) -> int:
    """Return the number of people that a site's examples are of, those that the job cannot use among them."""
    used = (examples.train_subjects, examples.test_subjects, examples.validation_subjects)
    if any(used):
        return len({name for names in used for name in names}) + examples.skipped
    return examples.n_train + examples.n_test + examples.n_validation + examples.skipped


def read_declaration(local: Path) -> Declaration | None:
    """Return the declaration in a site's local folder; None if there is none.

    Raises:
        DataError: it cannot be read.
    """
    file = local / PEOPLE_FILE
    if not file.is_file():
        return None
    try:
        return Declaration.model_validate(read_content(file))
    except (ConfigError, ValidationError) as error:
        problem = str(error).removeprefix(f"{file}: ")
        raise DataError(f"{file}: cannot be read as a declaration of people: {problem}") from error


def read_people(declaration: Declaration, data: SiteData, local: Path, seed: int) -> People:
    """Return the declared columns and the fold of each person who is in the table and has not withdrawn.

    Raises:
        DataError: the table cannot be read, or lacks a column.
    """
    table = read_table(find_table(data.path if declaration.table is None else local / declaration.table))
    names = table.get_names(declaration.id)
    people = _list_people(table, names, declaration.columns, seed, declaration.folds)
    absent = find_absent_rows(data, table) if data.withdrawn and data.id in table.columns else ()
    own = set(data.select(people)) - {names[row] for row in absent}
    return {name: values for name, values in people.items() if name in own}


def _list_people(table: Table, names: list[str], columns: Columns, seed: int, folds: int) -> People:
    """Return the columns and the fold of each person; a person may have several rows: the first one tells the cell."""
    rows = {name: row for row, name in reversed(list(enumerate(names)))}
    # Names for lists, and numbers as Python spells them for intervals.
    values = {
        column: table.get_names(column) if is_listed(groups) else list(map(repr, table.get_numbers(column).tolist()))
        for column, groups in columns.items()
    }
    return {
        name: {FOLD: assign_fold(seed, name, folds), **{column: own[row] for column, own in values.items()}}
        for name, row in rows.items()
    }


def find_table(path: Path) -> Path:
    """Return the table of people at a path: the file itself, or ``participants.tsv`` in a folder."""
    return path / "participants.tsv" if path.is_dir() else path


def propose(table: Table, id_column: str, folds: int, rule: Rule, seed: int) -> tuple[Declaration, list[str]]:
    """Return a declaration with each column of a table that can be one, in order, and the columns that cannot.

    A label with fewer people than the minimum goes into the last group; numbers are divided at their median.

    Args:
        table: the table of the people.
        id_column: its column of identifiers.
        folds: largest number of folds; there are as many as the people suffice for.
        rule: minimum of a cell.
        seed: seed of the site's folds.

    Raises:
        DataError: there is no such column, or there are too few people for two folds.
    """
    names = table.get_names(id_column)
    tried = {name: found for name in table.columns if name != id_column and (found := _group(table, name, rule))}
    for count in range(folds, 1, -1):
        people = _list_people(table, names, tried, seed, count)
        accepted = declare(rule, b"", {FOLD: build_folds(count), **tried}, people).columns
        if FOLD in accepted:
            break
    else:
        raise DataError(
            f"{table.source}: {len(set(names))} people are too few for two folds of at least {rule.minimum} each. "
            "Declare nothing: the site then has one cell, everybody"
        )
    columns = {name: groups for name, groups in accepted.items() if name != FOLD}
    left = [name for name in table.columns if name not in (*columns, id_column)]
    return Declaration(id=id_column, folds=count, columns=columns), left


def _group(table: Table, name: str, rule: Rule) -> Groups:
    """Return groups of a column's values; empty for free text and for a column of one value."""
    counts = Counter(table.get_names(name))
    if len(counts) <= _MOST_LABELS:
        large = sorted(label for label, count in counts.items() if count >= rule.minimum and label)
        rare = sorted(label for label in counts if label not in large and label)
        groups = [(label,) for label in large] + ([tuple(rare)] if rare else [])
        return tuple(groups) if len(groups) > 1 else ()
    if table.is_text(name) or table.find_date(name):
        return ()
    values = table.get_numbers(name)
    return (float(np.nanmedian(values)),) if np.isfinite(values).mean() > 0.5 else ()
