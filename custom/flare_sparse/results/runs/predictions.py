"""Predictions of a run's models, and of its baselines, for every test subject of every site on this machine.

A subject is a site and the rank of its identifier among the identifiers of that site: the same in every split, and no
name. Ranks of two runs name the same subjects only where the sites' identifiers are the same, which their digest tells.
Only a run whose data lies on this machine has such predictions: a deployed site sends metrics, as its policy
allows, and no prediction of a subject.

Pictures of the best, the median and the worst case of every site, where the data of the sites is on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic.dataclasses
import torch
from pydantic import PlainSerializer, PlainValidator, TypeAdapter
from torch import Tensor
from torch.utils.data import Subset

from ...config.assemble import Assembly
from ...core.checkpoint.writing import write_json
from ...core.errors import DataError
from ...methods.method import describe_site_model
from ...tasks.task import PARTS, Examples, Kind, Picture, SiteData, Task, load_examples
from .baselines import SiteRows, fit_baselines, label_rows
from .load import read_run_model
from .model_files import find_site_models
from .received import parse_record

PREDICTIONS_FILE = "test_predictions.json"
"""File in the folder of evaluations with the predictions of every test subject."""
RUN = "run"
"""Name of the run's own predictions."""
TOLERANCE = 1e-3
"""Largest relative difference of a recomputed metric from the recorded one; other data differs far more."""


def _store(**options: Any) -> tuple[Any, ...]:
    """Return how arrays become lists of a JSON file, and lists arrays."""
    return PlainValidator(partial(np.array, **options)), PlainSerializer(np.ndarray.tolist)


Names = Annotated[np.ndarray, *_store(dtype=str)]
Ranks = Annotated[np.ndarray, *_store(dtype=np.int64)]
Rows = Annotated[np.ndarray, *_store(dtype=np.float64, ndmin=2)]


@pydantic.dataclasses.dataclass(frozen=True)
class Predictions:
    """Predictions for the test examples of all sites, in the order of the sites' names.

    Attributes:
        identity: run id and digest of the model that the predictions are of.
        kind: kind of the targets; None: unknown.
        sites: ``(n,)`` names of the sites.
        subjects: ``(n,)`` rank of the subject's identifier at its site; -1: not known.
        targets: ``(n, t)``.
        values: predictions ``(n, k)`` by name: ``"run"`` and the baselines.
        digests: SHA-256 of each site's identifiers, of the test targets where they are not known.
        site_models: names of the predictors that are another model at each site.
        pooled: metrics of the run over all test subjects at once.
        note: why baselines are missing; empty where they are not.
    """

    identity: str
    kind: Kind | None
    sites: Names
    subjects: Ranks
    targets: Rows
    values: dict[str, Rows]
    digests: dict[str, str]
    site_models: tuple[str, ...] = ()
    pooled: dict[str, float] = field(default_factory=dict)
    note: str = ""

    def write(self, file: Path) -> None:
        """Write the predictions as JSON."""
        file.parent.mkdir(exist_ok=True)
        write_json(file, _ADAPTER.dump_python(self))

    @classmethod
    def read(cls, file: Path, identity: str) -> Predictions | None:
        """Read the predictions of a run; None if there are none, those of another model, or damaged ones."""
        try:
            found = _ADAPTER.validate_python(parse_record(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, OverflowError):
            return None
        lengths = {len(part) for part in (found.sites, found.subjects, found.targets, *found.values.values())}
        return found if found.identity == identity and len(lengths) == 1 else None


_ADAPTER = TypeAdapter(Predictions)


def compute_predictions(
    run: Path,
    assembly: Assembly,
    sites: Mapping[str, SiteData],
    recorded: Mapping[str, Mapping[str, float]],
    identity: str,
) -> Predictions:
    """Return the predictions of a run's final models and of its baselines.

    Args:
        run: result folder.
        assembly: parts of the run.
        sites: data of the sites.
        recorded: final metrics by site, which the predictions must reproduce.
        identity: run id and digest of the model.

    Raises:
        ConfigError: the run has no readable model.
        DataError: the data cannot be loaded, or is not that of the run.
    """
    task, own = assembly.task, find_site_models(run) if describe_site_model(assembly.method.config) else {}
    parts, rows, digests = [], {}, {}
    for name in sorted(sites):
        examples = load_examples(task, sites[name], assembly.method.seed)
        # A site that never contributed has no model of its own, and no part in a comparison.
        if name not in recorded or (describe_site_model(assembly.method.config) and name not in own):
            continue
        rows[name] = _tabulate(task, name, examples)
        if not examples.n_test:
            continue
        predictions, targets = _predict_site(run, assembly, name, examples, recorded[name])
        ranks = _rank_subjects(examples)
        parts.append((predictions, targets, ranks, np.full(examples.n_test, name)))
        facts = sorted(_list_names(examples)) if (ranks >= 0).all() else _to_rows(targets).tolist()
        digests[name] = sha256(json.dumps(facts).encode()).hexdigest()
    if not parts:
        raise DataError(f"{run}: no site has test examples and a model, so there is nothing to compare")
    predictions, targets = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    values, note = _fit(task, rows)
    return Predictions(
        identity=identity,
        kind=task.kind,
        sites=np.concatenate([part[3] for part in parts]),
        subjects=np.concatenate([part[2] for part in parts]),
        targets=_to_rows(targets),
        values={RUN: _to_rows(predictions), **values},
        digests=digests,
        site_models=(*([RUN] if own else []), *(name for name in values if name.endswith("_local"))),
        pooled=task.metrics(predictions, targets),
        note=note,
    )


def _predict_site(
    run: Path, assembly: Assembly, name: str, examples: Examples, recorded: Mapping[str, float]
) -> tuple[Tensor, Tensor]:
    """Return predictions and targets of the test examples of a site."""
    task, network = assembly.task, assembly.build_network(_read_model_at(run, assembly, name))
    predictions, targets = task.measure_all(network, examples.test)
    metrics = task.metrics(predictions, targets)
    for metric, value in metrics.items():
        expected = recorded.get(metric, value)
        if abs(value - expected) > TOLERANCE * max(abs(expected), 1.0):
            raise DataError(
                f"site {name}: {metric} of the final model is {value:.6g} on the data here, but the run recorded "
                f"{expected:.6g}; the data or the package has changed since the run"
            )
    return predictions, targets


def _rank_subjects(examples: Examples) -> np.ndarray:
    """Return the rank of each test example's subject among the site's subjects; -1 where the task names none."""
    tested = examples.test_subjects or examples.test_ids
    if len(tested) != examples.n_test:
        return np.full(examples.n_test, -1)
    ranks = {name: rank for rank, name in enumerate(sorted({subject for subject, _ in _list_names(examples)}))}
    return np.array([ranks[name] for name in tested], dtype=np.int64)


def _list_names(examples: Examples) -> list[tuple[str, str]]:
    """Return subject and identifier of each example; an example without a subject is one of its own."""
    parts = ((getattr(examples, f"{part}_ids"), getattr(examples, f"{part}_subjects")) for part in PARTS)
    return [pair for ids, subjects in parts for pair in zip(subjects or ids, ids or subjects, strict=True)]


def _tabulate(task: Task, site: str, examples: Examples) -> SiteRows | None:
    """Return a site's examples as rows; None if the task has no linear baseline."""
    if task.kind is None:
        return None
    try:
        tables = [task.tabulate_all(getattr(examples, part)) for part in PARTS]
    except NotImplementedError:
        return None
    subjects = (getattr(examples, f"{part}_subjects") for part in PARTS)
    return SiteRows(
        *(label_rows(site, _to_rows(x), _to_rows(y), own) for (x, y), own in zip(tables, subjects, strict=True))
    )


def _fit(task: Task, rows: Mapping[str, SiteRows | None]) -> tuple[dict[str, np.ndarray], str]:
    """Return the predictions of each baseline for all test subjects, and why there are none."""
    usable = {name: site for name, site in rows.items() if site is not None}
    if task.kind is None or len(usable) < len(rows):
        return {}, f"{type(task).__name__} has no linear baselines: it sets no kind, or its inputs are no rows"
    try:
        return fit_baselines(task.kind, usable), ""
    except ImportError:
        return {}, "baselines need scikit-learn: pip install 'flare-sparse[baselines]'"


def _to_rows(values: Any) -> np.ndarray:
    """Return an array ``(n, k)`` in float64."""
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values, dtype=np.float64)
    return array.reshape(len(array), -1) if len(array) else np.zeros((0, 1))


RANKS = ("best", "median", "worst")


@dataclass(frozen=True)
class CasePicture:
    """The picture of one case.

    Attributes:
        site: name of the site.
        rank: ``best``, ``median`` or ``worst`` of the site's test cases, by the run's metric.
        value: the metric of this case.
        picture: image, labels and prediction.
    """

    site: str
    rank: str
    value: float
    picture: Picture


def compute_pictures(
    run: Path, assembly: Assembly, sites: Mapping[str, SiteData], predictions: Predictions
) -> list[CasePicture]:
    """Return pictures of the cases that the predictions rank best, median and worst at each site.

    Args:
        run: result folder.
        assembly: parts of the run.
        sites: data of the sites.
        predictions: what the task measured of every test case.

    Raises:
        ConfigError, DataError: as :func:`flare_sparse.results.runs.predictions.compute_predictions`.
    """
    task, pictures = assembly.task, list[CasePicture]()
    for site in sorted(set(predictions.sites.tolist())):
        rows = predictions.sites == site
        pairs = zip(*(torch.from_numpy(part[rows]) for part in (predictions.values[RUN], predictions.targets)),
                    strict=True)  # fmt: skip
        values = [task.metrics(row[None], target[None])[task.metric.name] for row, target in pairs]
        model = assembly.build_network(_read_model_at(run, assembly, site))
        test = load_examples(task, sites[site], assembly.method.seed).test
        order = sorted(range(len(values)), key=values.__getitem__, reverse=task.metric.mode == "max")
        for rank, index in zip(RANKS, (order[0], order[len(order) // 2], order[-1]), strict=True):
            batch = next(task.iterate_batches(Subset(test, [index]), 1))
            if (picture := task.illustrate(model, batch)) is None:
                return []
            pictures.append(CasePicture(site, rank, values[index], picture))
    return pictures


def _read_model_at(run: Path, assembly: Assembly, site: str) -> Tensor:
    """Return the final model that a site uses: its own, or the run's."""
    has_own = describe_site_model(assembly.method.config) and site in find_site_models(run)
    return read_run_model(run, assembly, site if has_own else "final")
