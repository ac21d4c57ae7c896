"""Settings of the generic table task: columns, target, scaling and network."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from ..core.errors import ConfigError, DataError
from ..core.names import clean_names, describe_absent
from ..core.needs import Need, Needs
from ..inputs.harmonization import Harmonizer
from ..inputs.scaling import InputScaler, StatisticsLayer
from .classes import check_class_weights, list_weight_needs
from .data.features import ATLASES, Labels, list_inputs, name_labels, number_labels
from .data.table_files import read_header
from .data.tables import Censored
from .models import ModelConfig, require_input
from .outcomes import ClassOutcome, Loss, NumberOutcome, SurvivalOutcome
from .task import Kind, TaskConfig

BINARY_LABELS = ("0", "1")
"""Labels of kind binary without classes."""
_KINDS: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(("classes", "class_weights"), ("binary", "classes")),
    **dict.fromkeys(("event", "loss"), ("survival",)),
    **dict.fromkeys(("target_scaling", "target_transform"), ("regression",)),
}
"""Kinds that a setting is for, where it is not for all."""
MOST_COLUMNS = 1_000_000
"""Most columns that a range such as ``code_{0..419}`` stands for."""
MOST_SPREADS = 5
"""Distance of targets from the center of ``target_scale``, in its spreads, that takes many rounds to learn."""


def _read_labels(value: Any) -> Any:
    """Return labels as text, and merged ones, ``{disease: [1, 2]}``, as pairs: their order must survive any file."""
    if isinstance(value, dict):
        return _read_labels([[name, group] for name, group in value.items()])
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"found {value!r}; expected labels, [a, b], or groups of them, {{none: 0, disease: [1, 2]}}")
    labels: list[Any] = [_read_group(*item) if isinstance(item, (list, tuple)) else _read_label(item) for item in value]
    flat = [label for item in labels for label in ((item,) if isinstance(item, str) else item[1])]
    names = name_labels(tuple(labels))
    if repeated := [label for some in (flat, names) for label in some if some.count(label) > 1]:
        raise ValueError(f"a label occurs twice: {repeated[0]!r}; give each to one class")
    return tuple(labels)


def _read_group(name: Any = None, group: Any = (), *more: Any) -> tuple[str, tuple[str, ...]]:
    members = tuple(group) if isinstance(group, (list, tuple)) else (group,)
    if more or not members:
        raise ValueError(f"class {name!r} has no label; expected the labels of the table that it stands for, [1, 2]")
    return _read_label(name), tuple(_read_label(label) for label in members)


def _read_label(label: Any) -> str:
    """Return a label as text; YAML reads ``yes`` and ``no`` as booleans."""
    if isinstance(label, bool) or not isinstance(label, (str, int)):
        raise ValueError(f"label {label!r}: expected text or a whole number; write labels such as 'yes' in quotes")
    return str(label)


def _read_codes(value: Any) -> Any:
    """Return codes for missing values as text."""
    codes = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if wrong := [code for code in codes if isinstance(code, bool) or not isinstance(code, (str, int, float))]:
        raise ValueError(f"code {wrong[0]!r}: expected a number or text, or a list of them, ['?', 9]")
    return tuple(str(code) for code in codes)


LabelList = Annotated[Labels, BeforeValidator(_read_labels)]
Codes = Annotated[tuple[str, ...], BeforeValidator(_read_codes)]
Constants = dict[str, tuple[float, Annotated[float, Field(gt=0)]]]
Scaling = Literal["site", "federated", "combat", "freesurfer", "none"] | Constants


def _expand_names(value: Any) -> Any:
    """Return names of columns, with those of an atlas in place of its name, and ``x_0``, ``x_1`` for ``x_{0..1}``."""
    names = value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, dict) or any("*" in str(name) for name in names):
        raise ValueError("the columns are not known here; set task.header to a table of a site, or to its first line")
    if not isinstance(value, (list, tuple)):
        return value
    return [column for name in value for column in (_list_columns(name) if isinstance(name, str) else (name,))]


def _list_columns(name: str) -> Sequence[str]:
    if (found := re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", name)) is None:
        return ATLASES.get(name, (name,))
    start, first, last, end = found.groups()
    if not int(first) <= int(last) < int(first) + MOST_COLUMNS:
        raise ValueError(f"{name!r}: expected ascending numbers, such as code_{{0..419}}, at most {MOST_COLUMNS:,}")
    return [f"{start}{number}{end}" for number in range(int(first), int(last) + 1)]


def select_columns(features: Any, header: Sequence[str], others: Collection[str]) -> Any:
    """Return the columns that patterns and ``{all_but: [...]}`` select; other names as they are.

    Args:
        features: the setting: names and patterns such as ``thick_*``, or ``{all_but: [id, site]}``.
        header: names of the table's columns, in order.
        others: columns that no pattern selects: target, identifiers.

    Raises:
        ValueError: a pattern selects nothing, or ``all_but`` names an unknown column.
    """
    rest = [name for name in header if name not in others]
    if isinstance(features, dict):
        if set(features) != {"all_but"} or not isinstance(features["all_but"], (list, tuple)):
            raise ValueError(f"found {features!r}; expected names and patterns, or {{all_but: [names and patterns]}}")
        left_out = {column for name in features["all_but"] for column in match_columns(str(name), header)}
        return [name for name in rest if name not in left_out]
    selected: list[Any] = []
    for name in features:
        is_pattern = isinstance(name, str) and "*" in name and name not in header
        selected += match_columns(name, rest) if is_pattern else [name]
    # Patterns may overlap, but a name that is given twice is a mistake.
    return [name for i, name in enumerate(selected) if name not in selected[:i] or features.count(name) > 1]


def match_columns(pattern: str, columns: Sequence[str]) -> list[str]:
    """Return the columns that a name or a pattern such as ``thick_*`` stands for.

    Raises:
        ValueError: there is none.
    """
    expression = re.escape(pattern).replace(r"\*", ".*")
    if not (found := [name for name in columns if name == pattern or re.fullmatch(expression, name)]):
        raise ValueError(describe_absent(pattern, columns))
    return found


class TableConfig(TaskConfig):
    """Columns of the table and what is predicted; the same at every site."""

    kind: Kind
    """what the target is: a number (regression), one of two labels (binary), one of several (classes), or the time of
    an event (survival)"""
    target: str
    """column to predict; for survival, the time of the event or of the last visit"""
    features: Annotated[tuple[str, ...], BeforeValidator(_expand_names)] = Field(min_length=1)
    """columns of the inputs, in order: names and patterns such as thick_*, or {all_but: [id, site]}; code_{0..419}
    stands for 420 columns, destrieux and desikan for those of these FreeSurfer atlases"""
    rows: dict[str, Codes] = Field(default_factory=dict)
    """rows that are examples: those whose columns have one of these values, {has_medications: 1}; empty: all"""
    header: str | None = None
    """file whose first line names the columns that patterns select from; read where the job is started, by default the
    table of the simulator. The job names the columns"""
    categories: dict[str, LabelList] = Field(default_factory=dict)
    """labels of the input columns that are categories, {sex: [F, M]}; groups of labels: {stage: {early: [1, 2], late:
    [3, 4]}}"""
    event: str | None = None
    """survival: column with 1 for an event, 0 for the end of observation"""
    loss: Loss = "cox"
    """survival: Cox's partial likelihood, which ranks subjects; hazards of the intervals that end at times (discrete);
    or a Weibull distribution. The last two predict probabilities at times"""
    times: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """survival, discrete and weibull: ascending times at which survival is predicted, [12, 24, 60]"""
    classes: LabelList = ()
    """labels of the target for binary and classes, or groups of labels, {none: 0, disease: [1, 2, 3]}; default for
    binary: 0, 1"""
    class_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """weight of an example in the loss, by label of classes; empty: 1. Constants of the job, as [1, 4]"""
    missing: Literal["refuse", "impute"] = "refuse"
    """missing inputs: refuse the example, or impute the center of the column and add an input per column that marks
    it"""
    missing_codes: dict[str, Codes] = Field(default_factory=dict)
    """values that stand for a missing one, by column or pattern: {chol: 0, 'lab_*': [-9, '?']}"""
    scaling: Scaling = "site"
    """scaling of numbers: by mean and standard deviation of the site's own training rows (site), of those of all sites
    (federated), of those of all sites without shift and scale of each site (combat, with method.personal: site), none,
    or by constants, {age: [50, 15]}: center and spread of a column; freesurfer: constants of anatomy for columns
    *_thickness in mm, ICV and other volumes in mm3"""
    covariates: tuple[str, ...] = ()
    """scaling combat: features whose effects on the others are kept, such as sex"""
    target_scale: tuple[float, Annotated[float, Field(gt=0)]] = (0.0, 1.0)
    """regression: value for the network's output 0, and the change per unit of the output"""
    target_transform: Literal["none", "log1p"] = "none"
    """regression: what the network learns: the target, or the logarithm of 1 + target; target_scale is that of the
    logarithm, and metrics are in the target's own unit"""
    target_scaling: Literal["none", "site"] = "none"
    """regression: site: the network predicts differences from the mean of the site's own training targets, in units of
    their standard deviation; both stay at the site, with method.personal: site"""
    clip: float | None = Field(None, gt=0)
    """largest absolute value of a scaled number, against outliers; null: no bound"""
    decimal: Literal[".", ","] = "."
    """decimal mark of numbers; with ',' a column may have commas or points, but not both"""
    censored: Censored = "refuse"
    """numbers such as <90 and >200: refuse them, use the limit, or half of a lower limit and an upper limit (half)"""
    unit: str = ""
    """regression: unit of the target in tables and plots"""
    id: str | None = None
    """column of unique identifiers; null: row numbers, from 1"""
    group: str | None = None
    """column of subjects with several rows; a subject's rows are in one part of the split"""
    skip_bad_subjects: bool = False
    """skip and count unusable rows; false: refuse to train if there are any"""
    model: Annotated[ModelConfig, require_input("features")] = ModelConfig(name="mlp")
    """network and its settings"""

    @classmethod
    def read_files(cls, settings: dict[str, Any], data: str | None) -> dict[str, Any]:
        """Replace patterns of columns by names, so that server and sites need no table to know the network.

        Raises:
            ConfigError: the header cannot be read, or a pattern selects nothing.
        """
        # The job carries names alone, and no path of this machine.
        names = {key: value for key, value in settings.items() if key != "header"}
        features = clean_names(settings.get("features"))
        has_patterns = isinstance(features, list) and any("*" in name for name in features if isinstance(name, str))
        path = settings.get("header") or data
        if not isinstance(path, str) or not (has_patterns or isinstance(features, dict)):
            return names
        others = {settings[key] for key in ("target", "event", "id", "group") if isinstance(settings.get(key), str)}
        try:
            selected = select_columns(features, read_header(Path(path.replace("{site}", "site-1"))), others)
        except (ValueError, DataError) as error:
            raise ConfigError(f"task.features: {error}") from error
        return {**names, "features": selected}

    @model_validator(mode="before")
    @classmethod
    def _clean_names(cls, settings: Any) -> Any:
        return clean_names(settings)

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        if len(set(self.features)) < len(self.features):
            raise ValueError("features: a column occurs twice")
        if self.target in self.features or (self.event is not None and self.event in self.features):
            raise ValueError("features: the target is among them, so the network would be told what to predict")
        known = set(self.features)
        scaled = set(self.scaling) if isinstance(self.scaling, dict) else set()
        for name, columns in (("categories", self.categories), ("scaling", scaled), ("covariates", self.covariates)):
            if extra := set(columns) - known:
                raise ValueError(f"{name}: {min(extra)!r} is not among the features; add it there or remove it")
        return self

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        for name, kinds in _KINDS.items():
            if self.kind not in kinds and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for kind {' and '.join(kinds)}, not for {self.kind}; remove it")
        if self.kind == "survival" and self.event is None:
            raise ValueError("event is missing; set the column with 1 for an event, 0 for the end of observation")
        if bool(self.times) != (self.loss != "cox"):
            remedy = "remove them, or set loss: discrete" if self.times else "set them, as [12, 24, 60]"
            raise ValueError(f"times are for loss discrete and weibull, and loss is {self.loss}; {remedy}")
        if list(self.times) != sorted(set(self.times)):
            raise ValueError(f"times: found {list(self.times)}; expected ascending times, each once")
        fits = {"binary": len(self.classes) in (0, 2), "classes": len(self.classes) > 2}
        if not fits.get(self.kind, True):
            raise ValueError(f"classes has {len(self.classes)} labels; expected 2 for binary, 3 or more for classes")
        check_class_weights(self.class_weights, len(self.classes or BINARY_LABELS))
        return self

    @model_validator(mode="after")
    def _check_codes(self) -> Self:
        for column, codes in self.codes_by_column.items():
            declared = self.classes if column == self.target else self.categories.get(column, ())
            if both := codes & set(number_labels(declared)):
                raise ValueError(
                    f"missing_codes: {min(both)!r} of column {column!r} is one of its labels, too; remove it from one"
                )
        return self

    @model_validator(mode="after")
    def _check_scaling(self) -> Self:
        if self.covariates and self.scaling != "combat":
            raise ValueError("covariates have an effect with scaling combat alone; remove them or set scaling: combat")
        if self.scaling == "combat" and self.missing == "impute":
            raise ValueError("scaling combat needs complete numbers; set missing: refuse with skip_bad_subjects: true")
        # Means of the training rows would do, but with them one subject would change another's inputs.
        centered = {*self.categories, *(self.scaling if isinstance(self.scaling, dict) else ())}
        uncentered = [name for name in self.features if name not in centered]
        if self.missing == "impute" and uncentered and self.scaling not in ("site", "federated"):
            raise ValueError(
                f"missing: impute imputes the center of a column, and scaling gives {uncentered[0]!r} none; add "
                f"{uncentered[0]}: [center, spread] to scaling, or set scaling: site or federated"
            )
        numbers = [name for name in self.features if name not in self.categories]
        has_volumes = any(not name.endswith("_thickness") for name in numbers)
        if self.scaling == "freesurfer" and has_volumes and "ICV" not in numbers:
            raise ValueError("scaling freesurfer divides volumes by the column ICV; add ICV to the features")
        return self

    def needs(self) -> Needs:
        needs, computes = (
            set(list_weight_needs(self.class_weights)),
            "computes mean and standard deviation of all subjects",
        )
        if self.target_scaling == "site":
            needs.add(Need.JOINT_SUBJECTS.because(f"task.target_scaling: site {computes}", "leave it out"))
        if self.scaling in ("site", "federated", "combat"):
            constants = "give constants, {age: [50, 15]}, or none"
            needs.add(Need.JOINT_SUBJECTS.because(f"task.scaling: {self.scaling} {computes}", constants))
        if self.kind == "survival" and self.loss == "cox":
            compares = "task.loss: cox compares subjects with each other"
            needs.add(Need.JOINT_SUBJECTS.because(compares, "set task.loss: discrete or weibull"))
        return frozenset(needs)

    @property
    def numeric_inputs(self) -> tuple[bool, ...]:
        """Which of the network's inputs are numbers; the others are categories and indicators."""
        inputs = list_inputs(self.features, self.categories, has_indicators=self.missing == "impute")
        return tuple(is_number for _, is_number in inputs)

    @property
    def codes_by_column(self) -> dict[str, set[str]]:
        """Values that stand for missing ones, by name of a column."""
        used = [*self.features, self.target, *([self.event] if self.event else [])]
        found: dict[str, set[str]] = {}
        for name, codes in self.missing_codes.items():
            for column in match_columns(name, used):
                found.setdefault(column, set()).update(codes)
        return found

    @property
    def scales_in_network(self) -> bool:
        """Whether the network's first layer scales the inputs, by statistics of all sites."""
        return self.scaling in ("federated", "combat")

    def describe_scale_mismatch(self, targets: np.ndarray) -> str:
        """Return a warning if the network's output is far from these targets ``(n, t)`` of a regression, else ""."""
        if self.kind != "regression" or self.target_scaling == "site" or not len(targets):
            return ""
        if self.target_transform == "log1p":
            targets = np.log1p(targets)
        (center, spread), mean, deviation = self.target_scale, float(targets.mean()), float(targets.std())
        if max(abs(mean - center), deviation) <= MOST_SPREADS * spread:
            return ""
        name = self.target if self.target_transform == "none" else f"{self.target_transform}({self.target})"
        # The deviation of equal targets is 0 or a rounding error.
        unit = deviation if deviation > 1e-9 * abs(mean) else 1.0
        return (
            f"{name} has the mean {mean:.4g} and the standard deviation {deviation:.2g} in the training rows, but "
            f"task.target_scale is [{center:g}, {spread:g}]: the network starts at {center:g} and takes many rounds to "
            f"get there. Set task.target_scale: [{mean:.6g}, {unit:.2g}], the same at all sites, or "
            "task.target_scaling: site with method.personal: site"
        )

    def describe_rows(self) -> str:
        """Return which rows are examples, as display text."""
        return " and ".join(f"{name} {' or '.join(values)}" for name, values in self.rows.items())

    def build_scaler(self) -> StatisticsLayer:
        """Return the first layer of a network that scales its inputs."""
        if self.scaling == "federated":
            return InputScaler(self.numeric_inputs, self.clip)
        columns = [name for name in self.features for _ in self.categories.get(name, ("",))]
        is_harmonized = [
            n and name not in self.covariates for name, n in zip(columns, self.numeric_inputs, strict=True)
        ]
        covariates = [position for position, name in enumerate(columns) if name in self.covariates]
        return Harmonizer(is_harmonized, covariates, self.clip)

    def build_outcome(self) -> NumberOutcome | ClassOutcome | SurvivalOutcome:
        """Return the outcome of the configured kind."""
        if self.kind == "regression":
            is_logarithm = self.target_transform == "log1p"
            return NumberOutcome(self.target, self.unit, *self.target_scale, is_logarithm=is_logarithm)
        if self.kind == "survival":
            assert self.event is not None, "checked above"
            return SurvivalOutcome(self.target, self.event, self.loss, self.times)
        return ClassOutcome(self.target, self.classes or BINARY_LABELS, self.class_weights)
