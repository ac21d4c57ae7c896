"""Task: the interface between a learning problem and the package. Ready-made tasks are in ``tasks/``."""

import math
import numbers
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import safetensors.torch
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..cohorts.conditions import Term
from ..cohorts.split import Split, SplitConfig
from ..cohorts.subgroups import ERROR, LONGEST_CELL, label_values, parse_subgroup, split_metric
from ..core.errors import ConfigError, DataError, FlareSparseError, MetricsError, TaskFailed, abbreviate, list_first
from ..core.findings import Finding
from ..core.names import describe_absent, list_beginnings
from ..core.needs import Needs
from ..core.params import separate_tensors
from ..core.reading import MinibatchReader, move_batch, stack_examples
from ..core.settings import Settings

VALIDATION = "validation_"
"""Prefix of the names of the metrics on validation examples."""
TEST_EXAMPLES = "test_examples"
"""Name of the metric that the other metrics of a site on test examples are weighted by."""
VALIDATION_EXAMPLES = f"{VALIDATION}examples"
"""Name of the metric that the metrics of a site on validation examples are weighted by."""
EPSILON = "epsilon"
"""Name of the number, sent with the metrics, that says what a run has charged the site's subjects so far."""
ORIENTATION = "orientation"
"""Kind of the column of the orientations of images, which stands beside those of a cohort."""
COUNTS = (TEST_EXAMPLES, VALIDATION_EXAMPLES)
"""Names of the metrics that are numbers of examples."""
METRIC_NAMES = "1 to 64 printable characters without quotes, brackets [ ] and < > & \\ `, for a subgroup 200 more"
"""What the name of a metric may be, for errors."""
_MAX_NAME_LENGTH = 64
# Names enter records, terminals and the report page: no markup, no quotes, no control characters.
_MARKUP = frozenset("<>&\"'`\\[]")


def get_count_name(metric: str) -> str:
    """Return the name of the number of examples that a metric was computed from."""
    return VALIDATION_EXAMPLES if metric.startswith(VALIDATION) else TEST_EXAMPLES


def is_metric_name(name: object) -> bool:
    """Return whether a site may report a metric of this name: :data:`METRIC_NAMES`."""
    if not isinstance(name, str):
        return False
    metric, cell = split_metric(name) or (name, "")
    if not 0 < len(metric.removeprefix(ERROR)) <= _MAX_NAME_LENGTH or len(cell) > LONGEST_CELL:
        return False
    # isprintable() refuses control characters, line breaks, escape sequences, and marks that reverse text.
    return name.isprintable() and not name.isspace() and _MARKUP.isdisjoint(name)


Kind = Literal["regression", "binary", "classes", "survival"]
"""What targets are: numbers; class 0 or 1; classes from 0; times with the mark of an event."""


class TaskConfig(Settings):
    """Base class of a task's settings; an unknown field is an error.

    Examples:
        >>> class Config(TaskConfig):
        ...     hidden: int = 16
        >>> Config(hidden=32, split={"test": 0.5}).split.test
        0.5
    """

    split: SplitConfig = Field(default_factory=SplitConfig)
    """which of a site's subjects are for training, validation and testing"""

    subgroups: tuple[str, ...] = ()
    """columns of the data by which the final metrics are reported, with a width of bins for numbers: [sex, age:10,
    scanner]"""
    min_subgroup: int = Field(10, ge=2)
    """fewest test subjects of a subgroup at a site; the site's policy may ask for more (min_test_examples)"""

    @field_validator("subgroups")
    @classmethod
    def _check_subgroups(cls, subgroups: tuple[str, ...]) -> tuple[str, ...]:
        for text in subgroups:
            parse_subgroup(text)
        return subgroups

    def needs(self) -> Needs:
        """Return what these settings need of the other parts of a run; by default nothing."""
        return frozenset()

    @classmethod
    def read_files(cls, settings: dict[str, Any], data: str | None) -> dict[str, Any]:
        """Return the section with the content of the files that it names, so that a job needs none of them.

        Only the command line calls it, before the settings are validated. By default the section stays as it is.

        Args:
            settings: the section ``task``; its paths are absolute.
            data: path of the simulator's data; None without one.

        Raises:
            ConfigError: a file cannot be read.
        """
        return settings


@dataclass(frozen=True)
class Metric:
    """The metric that rounds and models are compared by.

    Attributes:
        name: its key in the result of ``Task.metrics``.
        unit: unit for tables and plots, such as ``"years"``; empty for none.
        mode: ``"min"`` if lower is better, ``"max"`` if higher is better.
        may_be_undefined: whether ``Task.metrics`` may omit it, such as the AUC of test examples of a single class.

    Raises:
        ConfigError: the name is empty or reserved, or the mode is neither ``"min"`` nor ``"max"``.

    Examples:
        >>> Metric("mae", "years", "min").is_better(5.8, 6.1)
        True
    """

    name: str
    unit: str
    mode: Literal["min", "max"]
    may_be_undefined: bool = False

    def __post_init__(self) -> None:
        is_text = isinstance(self.name, str) and bool(self.name)
        if not is_text or self.name == TEST_EXAMPLES or self.name.startswith(VALIDATION):
            raise ConfigError(
                f"Metric: name is {self.name!r}; expected the key of the main metric in the result of metrics(), such "
                f"as 'mae' ({TEST_EXAMPLES!r} and names that start with {VALIDATION!r} are reserved)"
            )
        if self.mode not in ("min", "max"):
            raise ConfigError(
                f"Metric {self.name!r}: mode is {self.mode!r}; expected 'min' (lower is better) or 'max' (higher is "
                "better)"
            )

    def is_better(self, new: float, old: float) -> bool:
        """Return whether ``new`` is strictly better than ``old``."""
        return new < old if self.mode == "min" else new > old


@dataclass(frozen=True)
class SiteData:
    """Location of one site's examples. Set at the site, never in the job.

    Attributes:
        site: name of the site.
        path: folder or file.
        subset: identifiers of the site's examples; None for all examples of ``path``.
        methods: settings that the site chooses for itself, by name of the method.
        withdrawn: identifiers of subjects that must not be used (docs/withdrawal.md). Of a folder of data sets one
            without the name of its data set stands for all of that name.
        device: where the site computes if the job leaves it open; None: a GPU if there is one.
        id: column of the site's table with the identifiers of subjects; no job chooses it.
        people: names in the data, one of which each example of a user's task must have where subjects have withdrawn;
            None: they are not listed.

    Examples:
        >>> data = SiteData("site-1", Path("/data/brains"), withdrawn=frozenset({"sub-07"}))
        >>> data.select(["sub-01", "sub-07", "IXI/sub-07"])
        ('sub-01',)
    """

    site: str
    path: Path
    subset: tuple[str, ...] | None = None
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    withdrawn: frozenset[str] = frozenset()
    device: str | None = None
    id: str | None = None
    people: frozenset[str] | None = None

    def select(self, known: Iterable[str], subject_of: Callable[[str], str] = str) -> tuple[str, ...]:
        """Return the identifiers of the site's examples: ``subset``, or all, without those of withdrawn subjects.

        Args:
            known: identifiers of all examples at ``path``.
            subject_of: returns the subject of an example of ``known``.
        """
        known = tuple(known)
        names = known if self.subset is None else self.subset
        if not self.withdrawn:
            return names
        # An identifier of the subset that the data lacks has no subject; the task names it as missing.
        are_files = self.path.is_dir()
        left = self.withdrawn | {
            name
            for name in known
            if not self.withdrawn.isdisjoint(_list_owners(name, subject_of(name), are_files=are_files))
        }
        return tuple(name for name in names if name not in left)


def _list_owners(*names: str, are_files: bool) -> Iterator[str]:
    """Yield each name by which a withdrawn subject may be listed; names of files may begin with it."""
    for name in names:
        folder, slash, last = name.rpartition("/")
        yield name
        for text in list_beginnings(last) if are_files else (last,):
            yield text
            yield f"{folder}{slash}{text}"


PARTS = ("train", "validation", "test")
"""Parts of a site's examples."""


@dataclass(frozen=True)
class Examples:
    """A site's training, test and validation examples.

    Attributes:
        train: training examples.
        test: test examples; may be empty.
        skipped: number of unusable examples that are in none of them.
        train_ids: identifiers of the training examples, in order, for ``flare-sparse check``; empty: not known.
        test_ids: identifiers of the test examples.
        columns: names of the columns of a tabular input, in order; empty: not known.
        validation: examples that choose the best round and end a run early; None: none.
        validation_ids: identifiers of the validation examples.
        train_subjects: subject of each training example, in order, where a subject may have several; empty: every
            example is a subject of its own.
        test_subjects, validation_subjects: the same of the other examples.
        notes: what the record of an evaluation on these examples states, such as the rows that inputs are scaled by.
        warnings: what does not stop a run but may spoil its result; shown by ``flare-sparse check`` and logged.
        test_subgroups: subgroup of each test example, in order, by column.

    Examples:
        >>> from torch.utils.data import TensorDataset
        >>> rows = TensorDataset(torch.zeros(3, 2))
        >>> examples = Examples(train=rows, test=rows, train_subjects=["a", "a", "b"])
        >>> examples.n_train, examples.count_train_subjects()
        (3, 2)
    """

    train: Dataset[Any]
    test: Dataset[Any]
    skipped: int = 0
    train_ids: Sequence[str] = ()
    test_ids: Sequence[str] = ()
    columns: Sequence[str] = ()
    validation: Dataset[Any] | None = None
    validation_ids: Sequence[str] = ()
    train_subjects: Sequence[str] = ()
    test_subjects: Sequence[str] = ()
    validation_subjects: Sequence[str] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    test_subgroups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def n_train(self) -> int:
        """Number of training examples."""
        return len(self.train)  # type: ignore[arg-type]

    def count_train_subjects(self) -> int:
        """Return the number of subjects that the training examples are of."""
        return len(set(self.train_subjects)) if self.train_subjects else self.n_train

    @property
    def n_test(self) -> int:
        """Number of test examples."""
        return len(self.test)  # type: ignore[arg-type]

    @property
    def n_validation(self) -> int:
        """Number of validation examples."""
        return 0 if self.validation is None else len(self.validation)  # type: ignore[arg-type]

    def find_warnings(self, site: str) -> Iterator[Finding]:
        """Yield what a run survives, but may spoil its result, of the examples of a site."""
        texts = [*self.warnings]
        if not self.n_train:
            texts.append("no training examples: this site only evaluates and has no weight in any round")
        if not self.n_test:
            texts.append(
                "no test examples: this site appears in no mean over sites, and its row of the results is empty"
            )
        yield from (Finding("WARN", f"data of {site}", text) for text in texts)


@dataclass(frozen=True)
class Cohort:
    """Index of a data set, one item per example; the simulator partitions it into sites.

    Attributes:
        ids: unique identifiers.
        columns: per-example values such as ``site``, ``age``, ``label``; strings or numbers.
        subjects: subject of each example, where one may have several; empty: every example is a subject of its own.

    Raises:
        DataError: an identifier is not text or occurs twice, or a column differs in length.
    """

    ids: tuple[str, ...]
    columns: dict[str, np.ndarray]
    subjects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if others := [name for name in self.ids if not isinstance(name, str)]:
            kind = type(others[0]).__name__
            raise DataError(f"cohort: identifier {others[0]!r} is {kind}; expected text, such as str({others[0]!r})")
        # An identifier that occurs twice could put one example into two sites, or into training and test at once.
        if duplicates := [f"{name!r}" for name, count in Counter(self.ids).items() if count > 1]:
            raise DataError(
                f"cohort: {len(duplicates)} identifiers occur more than once: {', '.join(duplicates[:5])}; give every "
                "example an identifier of its own"
            )
        for name, values in self.columns.items():
            if len(values) != len(self.ids):
                raise DataError(
                    f"cohort: column {name!r} has {len(values)} values for {len(self.ids)} examples; expected one each"
                )


@dataclass(frozen=True)
class Column:
    """What one column of a site's table contains, for ``flare-sparse check``; it stays where it was computed.

    Attributes:
        name: name of the column.
        kind: what the column is, such as ``number`` or ``target``.
        missing: number of rows without a value.
        numbers: the values of a column of numbers; empty for others.
        labels: number of rows by label, for others.
    """

    name: str
    kind: str
    missing: int
    numbers: np.ndarray
    labels: Mapping[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.missing + len(self.numbers) + sum(self.labels.values())


@dataclass(frozen=True)
class Picture:
    """One slice of a case with its labels and the prediction.

    Attributes:
        image: float32 ``(height, width)``, as it is looked at: the first row is at the top.
        labels: uint8 ``(height, width)``, the class of each pixel; 0 is background.
        predicted: predicted classes, likewise.
        aspect: height of a pixel as a multiple of its width.
    """

    image: np.ndarray
    labels: np.ndarray
    predicted: np.ndarray
    aspect: float = 1.0


class Task(ABC):
    """One learning problem, the same on the server and at every site.

    A user task subclasses this class in the user's own module (docs/own-task.md). The server calls only ``model``;
    ``load`` runs at a site, and the examples that it returns stay there.

    Attributes:
        Config: class of the settings.
        metric: the metric that rounds and models are compared by.
        reads: the data that ``load`` reads, in one sentence; ``flare-sparse settings`` shows it.
        kind: what the targets are, for baselines and paired comparisons; None: runs are compared by their metrics only.

    Examples:
        >>> from torch.utils.data import TensorDataset
        >>> class Dose(Task):
        ...     metric = Metric("mae", "mg", "min")
        ...
        ...     def model(self):
        ...         return nn.Linear(2, 1)
        ...
        ...     def load(self, data, seed):
        ...         rows = TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
        ...         return Examples(train=rows, test=rows)
        ...
        ...     def predict(self, model, batch):
        ...         return model(batch[0]), batch[1]
        ...
        ...     def loss(self, model, batch):
        ...         return nn.functional.mse_loss(*self.predict(model, batch))
        ...
        ...     def metrics(self, predictions, targets):
        ...         return {"mae": float((predictions - targets).abs().mean())}
        >>> Dose().metrics(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
        {'mae': 1.0}
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    metric: Metric
    reads: ClassVar[str] = ""
    kind: Kind | None = None

    def __init__(self, config: TaskConfig | Mapping[str, Any] | None = None):
        self.config = config if isinstance(config, TaskConfig) else self.Config.model_validate(config or {})

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a newly initialised float32 network. Random numbers come from torch's global generator."""

    @abstractmethod
    def load(self, data: SiteData, seed: int) -> Examples:
        """Load the site's examples, split as ``config.split`` says; the split depends on ``seed`` only.

        Raises:
            DataError: the data is missing or invalid; the message names files and fields.
        """

    def cohort(self, path: Path) -> Cohort:
        """Return the index of a data set; only the simulator calls it, to partition the examples into sites.

        Raises:
            DataError: the data set does not exist.
            ConfigError: the task does not support partitioning.
        """
        raise ConfigError(
            f"simulator.data.partition: {type(self).__name__} has no cohort(), which lists the examples to divide; "
            "give each site its own folder (path: data/{site}), or let it divide them (partition: {kind: shared})"
        )

    def select(self, data: SiteData, cohort: Cohort) -> tuple[str, ...]:
        """Return the identifiers of a site's examples in a cohort, without those of subjects who have withdrawn."""
        subject_of = dict(zip(cohort.ids, cohort.subjects or cohort.ids, strict=True))
        return data.select(cohort.ids, subject_of.__getitem__)

    def list_row_conditions(self) -> list[Term]:
        """Return the conditions by which the settings choose rows; by default none."""
        return []

    def get_person_column(self) -> str | None:
        """Return the column whose values are the subjects; None: the data itself says who they are."""
        return None

    def describe_columns(self, data: SiteData) -> Sequence[Column]:
        """Return what each column of a site's table contains, for ``flare-sparse check``; by default nothing.

        Raises:
            DataError: the table cannot be read.
        """
        return ()

    def describe_site(self, train: Dataset[Any]) -> dict[str, Tensor]:
        """Return what the network knows of a site's own training examples, by name of the tensor; by default nothing.

        These tensors must stay at the site (``method.personal``); the values are those before training.
        """
        return {}

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss over one batch, a scalar."""

    def augment(self, batch: Any, generator: torch.Generator) -> Any:
        """Return a minibatch of training examples with random changes; by default the minibatch itself.

        Local training alone calls it. The changes must be drawn from ``generator``, which the run's seed, the site and
        the round determine, so that a run can be repeated and resumed to the same bits.
        """
        return batch

    @abstractmethod
    def predict(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return predictions and targets of one batch in the metric's unit; the first dimension is the batch."""

    def measure(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return what :meth:`metrics` needs of each example of a batch; by default its prediction and target.

        A task whose predictions cannot be stacked, such as label maps of volumes of different shapes, returns the
        measurements of each case ``(B, m)`` instead, and in :meth:`metrics` their means over cases. The mean over all
        sites, weighted by test examples, is then the mean over all cases.
        """
        return self.predict(model, batch)

    @abstractmethod
    def metrics(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        """Return the metrics over all test examples as finite numbers, ``metric.name`` among them.

        Args:
            predictions: the first results of :meth:`measure`, of all examples.
            targets: its second results.
        """

    def collate(self, examples: Sequence[Any]) -> Any:
        """Return the minibatch of some examples; by default each of their tensors stacked."""
        return stack_examples(examples)

    def iterate_batches(self, dataset: Dataset[Any], batch_size: int) -> Iterator[Any]:
        """Yield the examples of a data set in order, in batches of at most ``batch_size``."""
        # Loaders draw a number for their processes: from here, or else from torch's own generator.
        draws, examples = torch.Generator(), MinibatchReader(dataset)
        yield from DataLoader(examples, batch_size=batch_size, generator=draws, collate_fn=self.collate)

    def tabulate(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the examples of a batch as rows for linear baselines: features ``(B, d)`` and targets ``(B, t)``.

        By default the batch is inputs and targets, and every number of an input is a feature; NaN is a missing one.

        Raises:
            NotImplementedError: a linear model of the inputs makes no sense, as with the tokens of a text.
        """
        return batch[0].flatten(1).float(), batch[1].reshape(len(batch[1]), -1)

    def illustrate(self, model: nn.Module, batch: Any) -> Picture | None:
        """Return a picture of a prediction, of a batch of one example; by default None: there is nothing to see."""
        return None

    def write_predictions(self, model: nn.Module, data: SiteData, out: Path) -> Iterator[Path]:
        """Write the predictions for inputs at hand, which need no targets, and yield each file.

        Args:
            model: the trained network, in eval mode.
            data: location of the inputs, and who has withdrawn.
            out: folder to write to; created if missing.

        Raises:
            ConfigError: the task writes no predictions.
            DataError: the data is missing or invalid.
        """
        raise ConfigError(
            f"{type(self).__name__} writes no predictions of its own; flare-sparse evaluate computes its metrics, and "
            "load_model returns the network"
        )

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write a trained model to ``folder`` in a format that other tools read; by default ``model.safetensors``.

        Integer tensors (counters, position tables) are not saved: ``model`` creates them.
        """
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
        # A network may hold a module under several names, as MONAI's DynUNet does.
        safetensors.torch.save_file(separate_tensors(state), folder / "model.safetensors")

    def evaluate(self, model: nn.Module, test: Dataset[Any], batch_size: int = 16) -> dict[str, float]:
        """Return ``metrics`` over a data set, with the model in eval mode; empty for an empty data set.

        Raises:
            MetricsError: a metric is not a finite number, the main metric is missing, or a prediction is NaN.
        """
        if not len(test):  # type: ignore[arg-type]
            return {}
        measured, targets = self.measure_all(model, test, batch_size)
        # Measurements of a case may be undefined, but no prediction is: to argmax, NaN is the first class, and a model
        # that diverged would be right wherever that is the target.
        if type(self).measure is Task.measure and bool(measured.isnan().any()):
            count = int(measured.isnan().reshape(len(measured), -1).any(dim=1).sum())
            raise MetricsError(
                f"{type(self).__name__}.predict() returned NaN for {count} of {len(measured)} examples: the model has "
                "diverged, or their inputs are NaN"
            )
        return self._validate_metrics(self.metrics(measured, targets))

    def measure_all(self, model: nn.Module, dataset: Dataset[Any], batch_size: int = 16) -> tuple[Tensor, Tensor]:
        """Return ``measure`` over a data set with at least one example, with the model in eval mode."""
        was_training = model.training
        model.eval()
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with torch.no_grad():
            batches = (move_batch(batch, device) for batch in self.iterate_batches(dataset, batch_size))
            pairs = [tuple(part.cpu() for part in self.measure(model, batch)) for batch in batches]
        model.train(was_training)
        predictions, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        return predictions, targets

    def tabulate_all(self, dataset: Dataset[Any] | None) -> tuple[Tensor, Tensor]:
        """Return ``tabulate`` over a data set; empty for none."""
        if dataset is None or not len(dataset):  # type: ignore[arg-type]
            return torch.zeros(0, 1), torch.zeros(0, 1)
        rows = [self.tabulate(batch) for batch in self.iterate_batches(dataset, 64)]
        features, targets = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return features, targets

    def _validate_metrics(self, metrics: Any) -> dict[str, float]:
        """Return the metrics as floats; raise MetricsError as :meth:`evaluate` does."""
        source = f"{type(self).__name__}.metrics()"
        if not isinstance(metrics, Mapping):
            raise MetricsError(f"{source} returned {type(metrics).__name__}; expected a dict of names and numbers")
        for name, value in metrics.items():
            if not isinstance(name, str) or name.startswith(VALIDATION):
                raise MetricsError(
                    f"{source}: the name {name!r} is {type(name).__name__}; expected text that does not start with "
                    f"{VALIDATION!r}, which is reserved"
                )
            found = float(value) if isinstance(value, numbers.Real) else value
            if not isinstance(found, float) or not math.isfinite(found):
                raise MetricsError(
                    f"{source}: {name!r} is {abbreviate(found)}; expected a finite number, such as float(value). Omit "
                    "a metric that is undefined for these examples, and look for NaN in predictions and targets"
                )
        if self.metric.name not in metrics and not self.metric.may_be_undefined:
            raise MetricsError(
                f"{source} has no {self.metric.name!r}, by which rounds and models are compared; it has "
                f"{', '.join(metrics) or 'nothing'}. Return it, set Metric(name=...) to one of these, or "
                "Metric(..., may_be_undefined=True) if some test examples leave it undefined"
            )
        return {name: float(value) for name, value in metrics.items()}


def build_examples(
    split: Split,
    build_dataset: Callable[[Sequence[str]], Dataset[Any]],
    skipped: Sequence[str] = (),
    columns: Sequence[str] = (),
    subject_of: Mapping[str, str] | None = None,
) -> Examples:
    """Return the examples of a split.

    Args:
        split: identifiers of the parts.
        build_dataset: returns the data set of some identifiers, in their order.
        skipped: for each unusable example why it is in none of them.
        columns: names of the columns of a tabular input.
        subject_of: subject of each identifier; None: every example is a subject of its own.
    """
    train, test, validation = (build_dataset(ids) for ids in (split.train, split.test, split.validation))
    found = Examples(train, test, len(skipped), split.train, split.test, columns, validation, split.validation)
    if skipped:
        text = f"{len(skipped)} examples are skipped, since they cannot be used: {list_first(skipped, 3)}"
        found = replace(found, warnings=(text,))
    if subject_of is None or all(name == subject for name, subject in subject_of.items()):
        return found
    subjects = [[subject_of[name] for name in ids] for ids in (split.train, split.test, split.validation)]
    return replace(found, train_subjects=subjects[0], test_subjects=subjects[1], validation_subjects=subjects[2])


def load_examples(task: Task, data: SiteData, seed: int) -> Examples:
    """Return the examples that ``task.load`` returns, after checking their type.

    Raises:
        DataError: the data is missing or invalid, or ``load`` returned something other than two data sets.
        TaskFailed: ``load`` raised an exception of its own; the text names the user's line.
    """
    try:
        examples = task.load(data, seed)
    except FlareSparseError:
        raise
    except Exception as error:
        raise TaskFailed(data.site, f"{type(task).__name__}.load({data.path})", error) from error
    source = f"{type(task).__name__}.load()"
    if not isinstance(examples, Examples):
        raise DataError(
            f"{source} returned {type(examples).__name__}; expected flare_sparse.tasks.task.Examples(train, test), two "
            "torch data sets"
        )
    validation = () if examples.validation is None else examples.validation
    for name, dataset in {"train": examples.train, "test": examples.test, "validation": validation}.items():
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"{source}: {name} is {type(dataset).__name__}; expected a torch data set with a length, such as "
                "TensorDataset(x, y)"
            )
    if data.withdrawn:
        _check_withdrawn(source, examples, data, None if _is_built_in(task) else data.people)
    # A run that was to be chosen by validation would end without a best model, and no record would say why.
    if task.config.split.validation and examples.validation is None:
        raise DataError(
            f"{source} returned no validation examples, but task.split.validation is "
            f"{task.config.split.validation:g}; use self.config.split.assign(ids, seed) and "
            "Examples(train, test, validation=...)"
        )
    return replace(examples, test_subgroups=_label_tests(task, data, examples)) if task.config.subgroups else examples


def _label_tests(task: Task, data: SiteData, examples: Examples) -> dict[str, list[str]]:
    """Return the subgroup of each test example, by column.

    Raises:
        ConfigError: the task lists no columns.
        DataError: a column is missing or contains text in place of numbers, or the task names no test examples.
    """
    cohort = task.cohort(data.path)
    rows = {name: row for row, name in enumerate(cohort.ids)}
    if len(examples.test_ids) != examples.n_test or any(name not in rows for name in examples.test_ids):
        raise DataError("task.subgroups: load() and cohort() of the task do not name the same test examples")
    labels = {}
    for column, width in map(parse_subgroup, task.config.subgroups):
        if column not in cohort.columns:
            raise DataError(f"{data.path}: task.subgroups: {describe_absent(column, cohort.columns)}")
        try:
            values = label_values(np.asarray(cohort.columns[column]), width)
        except ValueError as error:
            raise DataError(f"{data.path}: task.subgroups: {column}: {error}") from error
        labels[column] = [values[rows[name]] for name in examples.test_ids]
    return labels


def _is_built_in(task: Task) -> bool:
    return type(task).__module__.partition(".")[0] == __name__.partition(".")[0]


def _check_withdrawn(source: str, examples: Examples, data: SiteData, people: Container[str] | None) -> None:
    """Refuse examples of subjects who have withdrawn, and examples that do not say whose they are.

    Args:
        source: named in the error.
        examples: the examples.
        data: location of the data.
        people: names in the site's data, which the task must use; None: any, as the task was checked.

    Raises:
        DataError: there are such examples.
    """
    withdrawn = data.withdrawn
    parts = (
        (examples.n_train, examples.train_ids, examples.train_subjects),
        (examples.n_test, examples.test_ids, examples.test_subjects),
        (examples.n_validation, examples.validation_ids, examples.validation_subjects),
    )
    if any(len(ids) != count for count, ids, _ in parts):
        raise DataError(
            f"{source} returned examples without identifiers: it cannot be shown that it leaves out {len(withdrawn)} "
            "withdrawn subjects; select the examples with data.select(ids) and return build_examples(...), or remove "
            "the data"
        )
    used = {name for _, ids, own in parts for name in (*ids, *own)}
    subjects = [name for _, ids, own in parts for name in (own or ids)]
    if people is not None and (other := [name for name in subjects if name.rpartition("/")[2] not in people]):
        raise DataError(
            f"{source} names {len(other)} examples or their subjects (first: {other[0]!r}) otherwise than the site's "
            f"data does, so that nothing shows whether they are of the {len(withdrawn)} withdrawn subjects; return the "
            "identifiers in the data as ids or as subjects"
        )
    if found := used.intersection(withdrawn):
        raise DataError(
            f"{source} returned data of {len(found)} withdrawn subjects; select the examples with data.select(ids)"
        )
