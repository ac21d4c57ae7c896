"""Evaluation of a finished run's models on data at hand, without a federation."""

import re
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from ...cohorts.split import Part
from ...config.assemble import Assembly
from ...config.study import Study
from ...core.checkpoint.writing import write_json
from ...core.errors import ConfigError, DataError, FlareSparseError
from ...core.observer import SILENT, Observer
from ...core.params import compute_digest
from ...core.seeds import make_generator
from ...methods.method import Method, describe_site_model
from ...tasks.task import PARTS, TEST_EXAMPLES, Examples, SiteData, Task, load_examples
from ...training import LocalTask, Site, build_site
from .load import list_run_models, read_run_model
from .model_files import read_mask, read_model, save_model
from .results import CROSS_SITE_FILE, EVALUATIONS

LEVEL = 0.95
"""Level of the bootstrap intervals."""
ADAPTED, ADAPTATION = "adapted", "adaptation.json"
"""Folder of a result folder with a folder for each new site, and the file of figures in it."""


NOTHING: Dataset[Any] = TensorDataset(torch.zeros(0))
"""No examples."""


class EvaluationSet:
    """The examples of one site, loaded and preprocessed by the run's own task with the run's settings.

    Args:
        assembly: parts of the run.
        data: location of the examples.
        split: all examples, or those that the task's split with the run's seed assigns to testing, validation or
            training.

    Attributes:
        size: number of examples.

    Raises:
        DataError: the data cannot be loaded.
        TaskFailed: a user's task cannot load it.
    """

    def __init__(self, assembly: Assembly, data: SiteData, split: Part):
        self.data, self._task, seed = data, assembly.task, assembly.method.seed
        self._examples = load_examples(self._task, data, seed)
        parts = {name: getattr(self._examples, name) for name in PARTS}
        chosen = [part for name, part in parts.items() if split in ("all", name) and part is not None and len(part)]
        self.size = sum(map(len, chosen))
        evaluated = Examples(NOTHING, ConcatDataset(chosen) if chosen else NOTHING)
        hardware = assembly.method.config.training.select_hardware(data.device)
        # A copy, which keeps what the metrics are computed from. They are its own: a task may keep what they need.
        task, self._captured = copy(self._task), list[tuple[Tensor, Tensor]]()
        self._metrics, task.metrics = task.metrics, self._capture  # type: ignore[method-assign]
        self._site = build_site(LocalTask.open(data.site, task, evaluated, assembly.network, seed, hardware))

    def _capture(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        self._captured.append((predictions, targets))
        return self._metrics(predictions, targets)

    def evaluate(self, weights: Tensor, resamples: int = 0) -> dict[str, Any]:
        """Return the metrics of a model ``(P,)``, computed as the sites of the run compute them.

        Args:
            weights: the model.
            resamples: number of bootstrap resamples of the examples; 0: no intervals.

        Raises:
            DataError: the model cannot be applied to the examples.
        """
        self._captured.clear()
        try:
            metrics = self._site.evaluate(weights)
        except FlareSparseError:
            raise
        # A user task may raise anything.
        except Exception as error:
            raise DataError(f"{self.data.path}: {_describe(self._task, 'evaluate', error)}") from error
        metrics.pop(TEST_EXAMPLES, None)
        intervals, notes = self._compute_intervals(sorted(metrics), resamples) if resamples else ({}, [])
        return {
            "examples": self.size,
            "skipped": self._examples.skipped,
            "metrics": metrics,
            "intervals": intervals,
            "notes": [*self._examples.notes, *notes],
        }

    def _compute_intervals(
        self, names: Sequence[str], resamples: int
    ) -> tuple[dict[str, tuple[float, float]], list[str]]:
        if len(self._captured) != 1 or any(len(part) != self.size for part in self._captured[0]):
            return {}, ["no intervals: the task does not compute its metrics once over all examples"]
        if self.size < 2:
            return {}, ["no intervals: one example cannot be resampled"]
        try:
            return bootstrap(self._metrics, *self._captured[0], names, resamples)
        except Exception as error:  # noqa: BLE001
            return {}, [f"no intervals: {_describe(self._task, 'metrics', error)} on a resample of the examples"]


def choose_evaluation_file(run: Path, cohort: str, model: str, *, overwrite: bool) -> Path:
    """Return the file of the record of an evaluation.

    Args:
        run: result folder.
        cohort: name of the cohort.
        model: ``final``, ``best``, or the name of a site.
        overwrite: the file may exist.

    Raises:
        ConfigError: the cohort's name is no name of a file, or the file exists and may not be replaced.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", cohort):
        raise ConfigError(f"--name {cohort!r}: expected letters, digits, '-', '_' and '.', because it names a file")
    if f"{cohort}.json" == CROSS_SITE_FILE:
        raise ConfigError(f"--name {cohort}: reserved for the evaluation at every site; choose another name")
    file = run / EVALUATIONS / f"{cohort}{'' if model == 'final' else f'-{model}'}.json"
    if file.exists() and not overwrite:
        raise ConfigError(f"{file}: exists already; choose another --name, or remove the file")
    return file


def evaluate_cohort(run: Path, study: Study, data: SiteData, split: Part, model: str, resamples: int) -> dict[str, Any]:
    """Evaluate one model of a run on one cohort and return the record.

    Raises:
        ConfigError: the run has no such model.
        DataError: the data cannot be loaded or has no examples, or the model cannot be applied to it.
    """
    assembly = study.assembly
    weights = read_run_model(run, assembly, model)
    cohort = EvaluationSet(assembly, data, split)
    if not cohort.size:
        raise DataError(f"{data.path}: there are no {'' if split == 'all' else f'{split} '}examples to evaluate on")
    result = cohort.evaluate(weights, resamples)
    absent = f"left out: {len(data.withdrawn)} subjects who have withdrawn from the run" if data.withdrawn else ""
    notes = (_note_model(assembly.method, model), _note_training_data(study, data.path, split), absent)
    return {
        "run": run.resolve().name,
        "run_id": assembly.run_id,
        "model": model,
        "model_sha256": compute_digest(weights),
        "cohort": data.site,
        "data": str(data.path),
        "split": split,
        "resamples": resamples,
        **result,
        "notes": [*filter(None, notes), *result["notes"]],
    }


def evaluate_matrix(run: Path, study: Study, observer: Observer = SILENT) -> dict[str, Any]:
    """Evaluate every model of a run at every simulated site's test examples and return the record.

    Raises:
        ConfigError: the run has no simulator section, so the sites' data is not on this machine.
    """
    assembly = study.assembly
    if study.config.simulator is None:
        raise ConfigError(
            f"{run}: without --data a run is evaluated at all of its sites, but config.yaml has no simulator section: "
            "their data is not on this machine; evaluate at each site with --data"
        )
    names = list_run_models(run, assembly)
    if not names:
        # The error of reading says why there is no model.
        read_run_model(run, assembly, "final")
    weights = {name: read_run_model(run, assembly, name) for name in names}
    examples, results = {}, {}
    for site, data in study.prepare_sites(run, observer).items():
        cohort = EvaluationSet(assembly, data, "test")
        examples[site] = cohort.size
        results[site] = {name: cohort.evaluate(weights[name])["metrics"] if cohort.size else {} for name in names}
    return {
        "run": run.resolve().name,
        "run_id": assembly.run_id,
        "split": "test",
        "metric": asdict(assembly.task.metric),
        "personal_model": describe_site_model(assembly.method.config),
        "examples": examples,
        "results": results,
    }


def adapt_to_site(assembly: Assembly, site: Site, run: Path, folder: Path) -> dict[str, Any]:
    """Adapt the model in ``run`` to a site, write the result to ``folder`` and return the figures.

    Raises:
        ConfigError: the model does not belong to this job, or the method does not adapt.
        DataError: the site has no training examples.
    """
    if not site.num_examples:
        raise DataError(f"site {site.name!r} has no training examples; adaptation needs some")
    weights = read_model(run / "model.safetensors", assembly.layout)
    live = read_mask(run / "model.safetensors", assembly.layout)
    site.weights = weights.clone()
    before = site.evaluate(weights)
    began = time.perf_counter()
    adapted = assembly.method.adapt(site, live).cpu()
    seconds = time.perf_counter() - began
    folder.mkdir(parents=True, exist_ok=True)
    after = site.evaluate(adapted)
    assert site.evaluated is not None, "the adapted model was evaluated"
    save_model(folder / "model.safetensors", *site.evaluated)
    figures = {
        "method": assembly.method.name,
        "site": site.name,
        "training_examples": site.num_examples,
        "before": before,
        "after": after,
        # An adaptation may prune further.
        "sparsity": 1 - int((live.take(adapted) != 0).sum()) / adapted.numel(),
        "adaptation_seconds": seconds,
        "sha256_before": compute_digest(weights),
        "sha256_after": compute_digest(adapted),
    }
    write_json(folder / ADAPTATION, figures)
    return figures


def _note_model(method: Method[Any, Any], model: str) -> str:
    """Return what was evaluated, where the metrics of the run are of other models."""
    site_model = describe_site_model(method.config)
    if not site_model or model not in ("final", "best"):
        return ""
    can_adapt = bool(method.config.personal) or type(method).adapt is not Method.adapt
    hint = "; flare-sparse evaluate RUN --data DIR --model adapted adapts it first" if can_adapt else ""
    return (
        f"{method.name}: this is the run's common model. The final metrics of the run are of each site's own model, "
        f"{site_model}{hint}"
    )


def _note_training_data(study: Study, data: Path, split: Part) -> str:
    """Return a note if the run has trained on examples that it is evaluated on; empty: it has not, as far as known."""
    simulator = study.config.simulator
    if simulator is None or simulator.data.path is None or split not in ("all", "train"):
        return ""
    names = [f"site-{number}" for number in range(1, (simulator.sites or 0) + 1)] or [""]
    if data not in [Path(str(simulator.data.path).replace("{site}", name)).resolve() for name in names]:
        return ""
    return (
        "this is the data that the run trained on: the metrics count training examples and say little about new "
        "subjects; use --split test, or other data"
    )


def bootstrap(
    compute: Callable[..., dict[str, float]], predictions: Tensor, targets: Tensor, names: Sequence[str], resamples: int
) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Return percentile intervals of a task's metrics, and notes on the metrics without one.

    Efron and Tibshirani (1993), An Introduction to the Bootstrap, section 13.3. Examples are resampled as if they were
    independent; several examples of one subject make the intervals too narrow.

    Args:
        compute: returns the metrics of predictions and targets.
        predictions: the first dimension is the example.
        targets: as ``predictions``.
        names: the metrics.
        resamples: number of resamples, with replacement.
    """
    generator, count = make_generator(0, "bootstrap"), len(targets)
    draws = (torch.randint(count, (count,), generator=generator) for _ in range(resamples))
    found = [compute(predictions[rows], targets[rows]) for rows in draws]
    intervals, notes = {}, []
    for name in names:
        values = [float(metrics[name]) for metrics in found if name in metrics]
        # A metric that is undefined on many resamples, such as the AUC of a few examples, has no honest interval.
        if len(values) < 0.95 * resamples:
            notes.append(f"{name}: no interval, defined on {len(values)} of {resamples} resamples")
            continue
        low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
        intervals[name] = (low, high)
    return intervals, notes


def _describe(task: Task, function: str, error: Exception) -> str:
    """Return which function of a task failed, and how."""
    return f"{type(task).__name__}.{function} failed: {type(error).__name__}: {error}"
