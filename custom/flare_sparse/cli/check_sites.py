"""The check of one site: its data, one training step, and the metrics of its test examples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from ..config.schema import RunConfig
from ..core.errors import ConfigError, DataError, FlareSparseError, TaskFailed, list_first, list_first_lines
from ..core.mask import Mask
from ..core.params import Layout
from ..core.seeds import seed_torch
from ..tasks.task import Column, Examples, Metric, SiteData, Task, load_examples
from ..training import LocalTask, build_site
from ..training.inputs import NonFinite, find_non_finite
from ..training.loop import TrainingDiverged

SAMPLE = 64
"""Number of test examples on which metrics are computed; all are used where a metric is undefined on this sample."""
_BATCH = 256
_MAX_LISTED = 5


@dataclass(frozen=True)
class Finding:
    """One problem: an error fails the check, a warning does not."""

    check: str
    error: Exception | None = None
    warning: str = ""


@dataclass
class SiteCheck:
    """What the check of one site found.

    Attributes:
        name: name of the site.
        examples: its examples; None if they cannot be loaded.
        columns: what the columns of its table contain; empty for other data.
        distance: L2 distance that one optimiser step moves the model; None if it was not taken.
        metrics: metrics of the initial model on test examples.
        findings: problems.
    """

    name: str
    examples: Examples | None = None
    columns: Sequence[Column] = ()
    distance: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @classmethod
    def run(cls, settings: RunConfig, task: Task, layout: Layout | None, data: SiteData) -> SiteCheck:
        """Load a site's examples, look for values that are not finite, train one step and compute the metrics.

        Args:
            settings: settings of the run.
            task: the task.
            layout: layout of the model; None if the model cannot be built: only the data is checked.
            data: location of the site's data.
        """
        result = cls(data.site)
        try:
            result.columns = task.describe_columns(data)
            examples = load_examples(task, data, settings.seed)
        except FlareSparseError as error:
            result.findings.append(Finding(f"data of {data.site}", error))
            return result
        result.examples = examples
        result.findings += [Finding(f"data of {data.site}", warning=text) for text in examples.warnings]
        problems = describe_non_finite_examples(task, examples, data)
        if problems:
            result.findings.append(Finding(f"inputs of {data.site}", DataError(problems)))
        if layout is None:
            return result
        # A step on NaN fails for that reason alone; it would only repeat the line above.
        if examples.n_train and not problems:
            result._take_step(settings, task, layout, examples)
        elif not examples.n_train:
            text = "no training examples: this site only evaluates and has no weight in any round"
            result.findings.append(Finding(f"data of {data.site}", warning=text))
        if examples.n_test and not problems:
            result._evaluate(settings, task, examples)
        elif not examples.n_test:
            text = "no test examples: this site appears in no mean over sites, and its row of the results is empty"
            result.findings.append(Finding(f"data of {data.site}", warning=text))
        return result

    def _take_step(self, settings: RunConfig, task: Task, layout: Layout, examples: Examples) -> None:
        check = f"training step at {self.name}"
        training = settings.method.config.training
        try:
            module = _build_model(task, settings.seed)
            site = build_site(LocalTask.open(self.name, task, examples, layout, settings.seed))
            start = layout.flatten(dict([*module.named_parameters(), *module.named_buffers()]))
            moved = site.train(start, Mask.full(layout.size), training, 1, steps=1) - start
            # Buffers, such as running statistics, move in the forward pass even if nothing is learned.
            self.distance = float(torch.linalg.vector_norm(moved[: layout.num_parameters]))
            if not math.isfinite(self.distance):
                raise TrainingDiverged("the step ends in values that are not finite; lower method.training.lr")
            if self.distance == 0:
                raise DataError(
                    "the step does not change the model: no gradient reaches a parameter. Look for detach(), .item(), "
                    "torch.no_grad() or an argmax in loss(), for frozen parameters, and for a constant loss"
                )
        except FlareSparseError as error:
            self.findings.append(Finding(check, error))
        # A user task's own code may raise anything; the other checks still run.
        except Exception as error:  # noqa: BLE001
            self.findings.append(Finding(check, TaskFailed(self.name, "loss()", error)))

    def _evaluate(self, settings: RunConfig, task: Task, examples: Examples) -> None:
        batch_size = settings.method.config.training.batch_size
        step = max(examples.n_test // SAMPLE, 1)
        sample: Dataset[Any] = Subset(examples.test, range(0, examples.n_test, step))
        # A metric such as AUC may be undefined for a sample and defined for all examples: only these decide.
        for is_last, test in ((step == 1, sample), (True, examples.test)):
            try:
                self.metrics = task.evaluate(_build_model(task, settings.seed), test, batch_size)
            # A user task's own code may raise anything; the other checks still run.
            except Exception as error:  # noqa: BLE001
                if is_last:
                    failure = error if isinstance(error, FlareSparseError) else self._describe_failure(error)
                    self.findings.append(Finding(f"metrics of {self.name}", failure))
                    return
            else:
                break
        if task.metric.name not in self.metrics:
            text = f"{task.metric.name} is undefined for its test examples"
            self.findings.append(Finding(f"metrics of {self.name}", warning=text))
        if shapes := find_broadcast_shapes(task, examples.test, batch_size):
            self.findings.append(Finding(f"metrics of {self.name}", warning=shapes))

    def _describe_failure(self, error: Exception) -> TaskFailed:
        return TaskFailed(self.name, "predict() or metrics()", error)


def _build_model(task: Task, seed: int) -> nn.Module:
    """Return the model that a run with this seed starts from."""
    with seed_torch(seed):
        return task.model()


def describe_non_finite_examples(task: Task, examples: Examples, data: SiteData) -> str:
    """Return where a site's examples contain NaN or infinite values, and the remedy; empty if there are none.

    Args:
        task: the task, which batches the examples.
        examples: the site's examples; their ``train_ids``, ``test_ids`` and ``columns`` name subjects and columns.
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
            problems = find_non_finite(batch)
            lines += [_describe_rows(problem, part, start, ids, examples.columns) for problem in problems]
            start += _count_examples(batch)
    if not lines:
        return ""
    remedy = "Impute these values or leave these examples out in the task's load(), or correct the data"
    return "\n".join([f"{data.path}:", *(f"  {line}" for line in list_first_lines(lines, _MAX_LISTED)), remedy])


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


def find_broadcast_shapes(task: Task, test: Dataset[Any], batch_size: int) -> str:
    """Return why predictions and targets would be paired all with all; empty if their shapes fit.

    Subtracting ``(n,)`` from ``(n, 1)`` gives ``(n, n)`` without an error, and a metric that is silently wrong.
    """
    batch = next(task.iterate_batches(test, max(batch_size, 2)))
    with torch.no_grad():
        predictions, targets = task.predict(task.model().eval(), batch)
    shapes = tuple(predictions.shape), tuple(targets.shape)
    if len(predictions) > 1 and predictions.numel() == targets.numel() and shapes[0] != shapes[1]:
        return (
            f"predict() returns predictions of shape {shapes[0]} and targets of shape {shapes[1]}; their difference "
            "pairs every prediction with every target. Return equal shapes, such as with squeeze(1)"
        )
    return ""


def merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of all sites, those of the same kind and text as one: a column is wrong for every site."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        kind = finding.check.rpartition(" ")[0]
        groups.setdefault((kind, str(finding.error or finding.warning)), []).append(finding)
    return [
        replace(group[0], check=f"{kind} {', '.join(finding.check.rpartition(' ')[2] for finding in group)}")
        for (kind, _), group in groups.items()
    ]


def find_federation_problems(settings: RunConfig, sites: Sequence[SiteCheck]) -> list[Finding]:
    """Return the problems that all sites together have: the quorum, no training or no test examples anywhere."""
    loaded = [site.examples for site in sites if site.examples is not None]
    trainable = [examples for examples in loaded if examples.n_train]
    quorum, problems = settings.federation.min_sites, []
    if quorum > len(trainable):
        text = (
            f"federation.min_sites is {quorum}, but only {len(trainable)} of {len(sites)} sites can train: no round "
            "can be committed. Repair the sites above, or lower federation.min_sites"
        )
        problems.append(Finding("quorum", ConfigError(text)))
    if loaded and not any(examples.n_test for examples in loaded):
        problems.append(Finding("test examples", DataError("no site has test examples: no model could be compared")))
    return problems


def build_sites_table(sites: Sequence[SiteCheck], metric: Metric) -> Table:
    """Return the table of all sites: examples, the distance of one step, and the main metric of the initial model."""
    title = f"first {metric.name} ({metric.unit})" if metric.unit else f"first {metric.name}"
    table = Table(box=None, pad_edge=False)
    table.add_column("site", no_wrap=True)
    for column in ("training", "test", "validation", "skipped", "one step moves", title):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for site in sites:
        counts, examples = ["-"] * 4, site.examples
        if examples is not None:
            numbers = (examples.n_train, examples.n_test, examples.n_validation, examples.skipped)
            counts = [str(number) for number in numbers]
        distance = "-" if site.distance is None else f"{site.distance:.3g}"
        value = f"{site.metrics[metric.name]:.4g}" if metric.name in site.metrics else "-"
        failed = any(finding.error is not None for finding in site.findings)
        verdict = "[bold red]FAIL[/]" if failed else "[bold yellow]WARN[/]" if site.findings else "[bold green]PASS[/]"
        table.add_row(escape(site.name), *counts, distance, value, verdict)
    return table
