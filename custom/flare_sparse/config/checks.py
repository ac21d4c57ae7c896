"""Checks of a site's examples, the same in every command: how many there are, and whether their values can be used."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from ..core.errors import DataError, list_first, list_first_lines
from ..core.findings import Finding, attempt
from ..tasks.task import Examples, SiteData, Task
from ..training.loop import NonFinite, find_non_finite
from .assemble import Assembly

_BATCH = 256
_MAX_LISTED = 5


def find_problems(assembly: Assembly, examples: Examples, data: SiteData) -> Iterator[Finding]:
    """Yield what is wrong with a site's examples, or may spoil a run's result.

    Args:
        assembly: parts of the job.
        examples: the site's examples.
        data: their location.
    """
    yield from examples.find_warnings(data.site)
    task, network = assembly.task, assembly.build_network(assembly.complete(assembly.weights))
    yield from _find_unusable_values(task, network, examples, data)
    if examples.n_test:
        yield from attempt("", partial(_find_broadcast_shapes, task, network, examples.test, data.site)).result or []


def _find_unusable_values(task: Task, network: nn.Module, examples: Examples, data: SiteData) -> Iterator[Finding]:
    """Yield where a site's examples have NaN or infinite values with which the network computes nothing finite.

    A network that fills in missing numbers, and a loss that leaves them out, are no problem.

    Args:
        task: the task, which batches the examples.
        network: the network of a run's start.
        examples: the site's examples; their identifiers and ``columns`` name subjects and columns.
        data: location of the data, named in the text.
    """
    lines = []
    for part, dataset, ids in (
        ("training", examples.train, examples.train_ids),
        ("validation", examples.validation, examples.validation_ids),
        ("test", examples.test, examples.test_ids),
    ):
        start = 0
        for batch in _iterate_batches(task, dataset) if dataset is not None else ():
            if (problems := find_non_finite(batch)) and not _is_computable(task, network, batch, part):
                lines += [_describe_rows(problem, part, start, ids, examples.columns) for problem in problems]
            start += _count_examples(batch)
    if lines:
        remedy = "Impute these values or leave these examples out in the task's load(), or correct the data"
        text = "\n".join([f"{data.path}:", *(f"  {line}" for line in list_first_lines(lines, _MAX_LISTED)), remedy])
        yield Finding.from_error(f"inputs of {data.site}", DataError(text))


def _find_broadcast_shapes(task: Task, network: nn.Module, test: Dataset[Any], site: str) -> list[Finding]:
    """Return a warning if predictions and targets would be paired all with all.

    Subtracting ``(n,)`` from ``(n, 1)`` gives ``(n, n)`` without an error, and a metric that is silently wrong.
    """
    batch = next(task.iterate_batches(test, 4))
    with torch.no_grad():
        predictions, targets = task.predict(network.eval(), batch)
    shapes = tuple(predictions.shape), tuple(targets.shape)
    if len(predictions) <= 1 or predictions.numel() != targets.numel() or shapes[0] == shapes[1]:
        return []
    text = (
        f"predict() returns predictions of shape {shapes[0]} and targets of shape {shapes[1]}; their difference "
        "pairs every prediction with every target. Return equal shapes, such as with squeeze(1)"
    )
    return [Finding("WARN", f"metrics of {site}", text)]


def _is_computable(task: Task, network: nn.Module, batch: Any, part: str) -> bool:
    """Return whether loss or predictions of a batch are finite."""
    try:
        with torch.no_grad():
            if part == "training":
                return bool(torch.isfinite(task.loss(network.eval(), batch)))
            return not find_non_finite(list(task.predict(network.eval(), batch)))
    except Exception:  # noqa: BLE001 - a user's own code
        return False


def _describe_rows(problem: NonFinite, part: str, start: int, ids: Sequence[str], columns: Sequence[str]) -> str:
    rows = [start + row for row in problem.rows]
    names = [str(ids[row]) if row < len(ids) else str(row) for row in rows]
    # The columns are those of the inputs, by convention the first part of a batch.
    is_input = problem.tensor in ("batch", "batch[0]")
    where = [columns[c] if is_input and c < len(columns) else f"column {c}" for c in problem.columns[:_MAX_LISTED]]
    return (
        f"{problem.kind} in {problem.tensor} of {part} examples {list_first(names, _MAX_LISTED)}"
        f"{' (' + ', '.join(where) + ')' if where else ''}"
    )


def _iterate_batches(task: Task, dataset: Dataset[Any]) -> Iterator[Any]:
    """Yield all examples of a data set in batches, in order."""
    if isinstance(dataset, TensorDataset):
        yield dataset.tensors
    elif len(dataset):  # type: ignore[arg-type]
        yield from task.iterate_batches(dataset, _BATCH)


def _count_examples(batch: Any) -> int:
    while isinstance(batch, (list, tuple, dict)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch) if hasattr(batch, "__len__") else _BATCH
