"""What a MONAI bundle declares: the parts of ``configs/train.json`` that a federated job needs."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ...core.errors import ConfigError, abbreviate
from ..task import METRIC_NAMES, Metric, is_metric_name
from .components import (
    CLASSES,
    LOWER_IS_BETTER,
    OPTIMIZERS,
    Component,
    is_known,
    parse_component,
    read_component,
    read_transforms,
)
from .references import MAX_DEPTH, References, open_references

Purpose = Literal["segmentation", "classification"]
"""What a bundle is for: its labels are maps, or classes."""
KEYS = ("image", "label")
"""Names of a case's image and its label, a map or a class, in the transforms."""
SCORES = {"Accuracy": "accuracy", "ROCAUC": "auc", "ROCAUCMetric": "auc"}
"""Metrics of a classification over all cases, of MONAI's and Ignite's handlers."""
LOAD = CLASSES["transform"]["LoadImaged"]
BINARY_LOSS = CLASSES["classification loss"]["BCEWithLogitsLoss"]
TRAIN = "train"
"""Name of the file with the training configuration, without its extension."""
ITEMS = {
    "network": ("network_def", "network", "net"),
    "loss": ("loss", "loss_function", "lossfn", "train::trainer::loss_function", "trainer::loss_function"),
    "preprocessing": ("train::preprocessing", "train::dataset::transform", "train_dataset::transform"),
    "evaluation": (
        "validate::preprocessing", "validate::dataset::transform", "val_dataset::transform", "eval_dataset::transform",
    ),
    "postprocessing": ("validate::postprocessing", "validate::evaluator::postprocessing", "evaluator::postprocessing"),
    "inferer": ("validate::inferer", "validate::evaluator::inferer", "evaluator::inferer"),
    "metric": ("validate::key_metric", "validate::evaluator::key_val_metric", "evaluator::key_val_metric"),
    "optimizer": ("optimizer", "train::trainer::optimizer", "trainer::optimizer"),
    "batch_size": ("train::dataloader::batch_size", "train_dataloader::batch_size"),
    "trainer": ("train::trainer", "trainer"),
}  # fmt: skip
"""Ids of each part: those of most bundles, then those of the template in MONAI's model zoo. The first one counts."""
_SETTINGS = {"lr": "lr", "weight_decay": "weight_decay", "momentum": "momentum", "amsgrad": "amsgrad"}
_DEFAULTS = {
    "betas": ([0.9, 0.999], [0.9, 0.98]), "eps": (1e-8,), "grad_averaging": (False,), "nesterov": (False,),
    "dampening": (0,), "maximize": (False,),
}  # fmt: skip
"""Arguments of optimisers that a bundle may write down, if they have the value that they have anyway."""
_INTERACTIONS = ("iteration_update", "prepare_batch")
"""Arguments with which a trainer does something else with a minibatch than to train on it."""


@dataclass(frozen=True)
class Declaration:
    """The parts of a bundle.

    Attributes:
        purpose: what it is for.
        network: the network.
        loss: training loss of logits and labels.
        preprocessing: transforms of training cases, deterministic ones first.
        evaluation_preprocessing: transforms of all other cases.
        inferer: how a whole volume is predicted.
        postprocessing: transforms of logits and label map before the metric; none of a classification, which is
            measured by the probabilities of the classes.
        metric: the metric of a case; of a classification, a name of :data:`SCORES` as its path.
        metric_name: its name.
    """

    purpose: Purpose
    network: Component
    loss: Component
    preprocessing: tuple[Component, ...]
    evaluation_preprocessing: tuple[Component, ...]
    inferer: Component
    postprocessing: tuple[Component, ...]
    metric: Component
    metric_name: str

    @property
    def main_metric(self) -> Metric:
        """The metric that compares rounds; undefined for cases without any label."""
        mode = "min" if self.metric.path in LOWER_IS_BETTER else "max"
        return Metric(self.metric_name, "", mode, may_be_undefined=True)  # type: ignore[arg-type]

    @property
    def num_outputs(self) -> int | None:
        """Channels or logits of the network's output; None where the bundle does not say."""
        return count_outputs(self.network)


def count_outputs(network: Component) -> int | None:
    """Return the number of channels or logits of a network's output; None where its arguments do not say."""
    numbers = (network.find_argument(name) for name in ("out_channels", "num_classes"))
    return next((number for number in numbers if isinstance(number, int)), None)


def encode_json(content: Mapping[str, Any], source: str) -> str:
    """Return the content of a configuration as JSON, which a job carries.

    Args:
        content: the parsed file.
        source: name of the file, for errors.

    Raises:
        ConfigError: JSON has no such value, as of a date in YAML or a NaN; the text names the file.
    """
    try:
        return json.dumps(content, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source}: cannot be written as JSON: {error}; put dates in quotes, and remove NaN and infinity"
        ) from error


def find_training_file(configs: Mapping[str, Any]) -> str:
    """Return the name of the file with the training configuration, such as ``train.json``.

    Raises:
        ConfigError: there is not exactly one.
    """
    files = [name for name in configs if name.rpartition(".")[0] == TRAIN]
    if not files:
        raise ConfigError(
            f"configs/ of the bundle has no train.json, train.yaml or train.yml, and thus nothing to train: it has "
            f"{', '.join(sorted(configs)) or 'no configuration'}"
        )
    if len(files) > 1:
        raise ConfigError(f"configs/ of the bundle has {len(files)} files {', '.join(files)}; expected one")
    return files[0]


def read_declaration(
    content: Mapping[str, Any], source: str, *, training: Collection[str] = ()
) -> tuple[Declaration, dict[str, Any]]:
    """Read the declared parts of a training configuration.

    Args:
        content: the parsed file.
        source: name of the file, for errors.
        training: which settings of ``method.training`` to read: ``batch_size``, ``optimizer``.

    Returns:
        The parts, and these settings.

    Raises:
        ConfigError: the bundle neither segments nor classifies; or a part is missing, its class is not allowed, or it
            needs code: the text names file, item and remedy of each.
    """
    parts: dict[str, Any] = {}
    with open_references(content, source, is_known) as references:
        purpose = _find_purpose(references)
        _check_trainer(references)
        segments = purpose == "segmentation"
        read_cases = partial(_read_preprocessing, loaded=KEYS if segments else KEYS[:1])
        required: dict[str, tuple[str, Callable[[References, str], Any]]] = {
            "network": ("the network", partial(read_component, kind="network" if segments else "classifier")),
            "loss": ("the loss", partial(read_component, kind="loss" if segments else "classification loss")),
            "preprocessing": ("the transforms of the training cases", read_cases),
            "metric": ("the key metric", _read_metric if segments else _read_score),
        }
        if segments:
            what = "the transforms that turn the network's output into predictions"
            required["postprocessing"] = (what, read_transforms)
        for part, (what, read) in required.items():
            with references.collect():
                name = references.find(*ITEMS[part])
                if name is None:
                    raise references.refuse(ITEMS[part][0], f"missing; add this item, from which the job reads {what}")
                parts[part] = read(references, name)
        with references.collect():
            evaluation = references.find(*ITEMS["evaluation"])
            parts["evaluation"] = read_cases(references, evaluation) if evaluation else None
        with references.collect():
            inferer = references.find(*ITEMS["inferer"])
            parts["inferer"] = read_component(references, inferer, "inferer") if inferer else _SIMPLE_INFERER
        with references.collect():
            settings = _read_training(references, training)
    if not segments:
        _check_outputs(parts["network"], parts["loss"])
    metric_name, metric = parts["metric"]
    declaration = Declaration(
        purpose,
        parts["network"],
        parts["loss"],
        parts["preprocessing"],
        parts["evaluation"] or parts["preprocessing"],
        parts["inferer"],
        parts.get("postprocessing", ()),
        metric,
        metric_name,
    )
    return declaration, settings


_SIMPLE_INFERER = Component(CLASSES["inferer"]["SimpleInferer"], {}, "inferer")


def _find_purpose(references: References) -> Purpose:
    """Return what a bundle is for, by its loss and key metric.

    Raises:
        ConfigError: it is neither for segmentation nor for classification.
    """
    loss, metric = (_find_target(references, part) for part in ("loss", "metric"))
    names = loss.rpartition(".")[2], metric.rpartition(".")[2]
    if "Dice" in loss or names[0] == "TverskyLoss" or names[1] in CLASSES["metric"]:
        return "segmentation"
    # Images are also classified where the key metric is one that is not read.
    if names[0] in CLASSES["classification loss"]:
        return "classification"
    raise ConfigError(
        f"{references.source}: this bundle neither segments nor classifies images: its loss is {loss or 'none'}, its "
        f"key metric {metric or 'none'}; expected those of a segmentation, such as DiceCELoss in loss or MeanDice in "
        "validate::key_metric, or of a classification, CrossEntropyLoss and Accuracy (docs/bundles.md)"
    )


def _check_outputs(network: Component, loss: Component) -> None:
    """Check that a classifier has a logit for each class, or one in all with the binary loss.

    Raises:
        ConfigError: it has not.
    """
    found, is_binary = count_outputs(network), loss.path == BINARY_LOSS
    if found is None or (found == 1) is not is_binary:
        expected = "1, because BCEWithLogitsLoss has two classes" if is_binary else "2 or more, one for each class"
        raise ConfigError(f"{network.location}: the network has {found} outputs; expected {expected}")


def _check_trainer(references: References) -> None:
    """Check that a bundle trains in the way that this package does.

    Raises:
        Refusal: the trainer does something else than to train on minibatches.
    """
    name = references.find(*ITEMS["trainer"])
    trainer = references.look_up(name) if name else None
    if name is None or not isinstance(trainer, Mapping):
        return
    target = str(trainer.get("_target_"))
    if target.rpartition(".")[2] != "SupervisedTrainer":
        problem = f"found {target!r}; expected SupervisedTrainer: no other way of training is read"
    elif keys := [key for key in _INTERACTIONS if key in trainer]:
        name, problem = f"{name}::{keys[0]}", "the trainer does more than to train on a minibatch, which is not read"
    else:
        return
    with references.collect():
        raise references.refuse(name, f"{problem}; use a task of your own (docs/bundles.md)")


def _find_target(references: References, part: str) -> str:
    """Return the class of a loss or of the first key metric, as it is written; empty if there is none."""
    name = references.find(*ITEMS[part])
    value = references.look_up(name) if name else None
    seen = 0
    while isinstance(value, str) and value[:1] in ("@", "%") and seen < MAX_DEPTH:
        value, seen = references.look_up(value[1:]), seen + 1
    if part == "metric" and isinstance(value, Mapping):
        value = next(iter(value.values()), None)
    return str(value.get("_target_", "")) if isinstance(value, Mapping) else abbreviate(str(value)) if value else ""


def _read_training(references: References, wanted: Collection[str]) -> dict[str, Any]:
    """Return the settings of ``method.training`` that a bundle declares: optimiser and batch size.

    Raises:
        Refusal: the optimiser is none of the package's.
    """
    settings: dict[str, Any] = {}
    if "batch_size" in wanted and (name := references.find(*ITEMS["batch_size"])):
        settings["batch_size"] = references.resolve(name)
    name = references.find(*ITEMS["optimizer"])
    if name is None or "optimizer" not in wanted:
        return settings
    value = references.resolve(name)
    target = str(value.get("_target_")) if isinstance(value, Mapping) else ""
    kind = OPTIMIZERS.get(target.rpartition(".")[2])
    if kind is None or not isinstance(value, Mapping):
        raise references.refuse(
            name, f"found {target!r}; expected one of {', '.join(OPTIMIZERS)}, or set method.training.optimizer"
        )
    for key, part in value.items():
        if key in _SETTINGS:
            settings[_SETTINGS[key]] = part
        elif not key.startswith("_") and part not in _DEFAULTS.get(key, ()):
            with references.collect():
                raise references.refuse(f"{name}::{key}", "not supported; remove it, or set method.training.optimizer")
    return {**settings, "optimizer": kind}


def _find_metric(references: References, name: str) -> tuple[str, Any]:
    """Return the first metric of an item: its name, and its content."""
    value = references.resolve(name)
    if not isinstance(value, Mapping) or not value or "_target_" in value:
        raise references.refuse(name, 'expected a section with one metric, such as {"val_mean_dice": {...}}')
    key, content = next(iter(value.items()))
    if not is_metric_name(key):
        raise references.refuse(name, f"found the name {abbreviate(key)} of a metric; expected {METRIC_NAMES}")
    return key, content


def _read_metric(references: References, name: str) -> tuple[str, Component]:
    """Return the key metric of a segmentation, and its name."""
    key, content = _find_metric(references, name)
    component = parse_component(references, content, f"{name}::{key}", "metric")
    # The handlers' default is MONAI's; a case has no mean over a batch.
    args = {option: part for option, part in component.args.items() if option not in ("reduction", "get_not_nans")}
    return key, Component(component.path, args, component.location)


def _read_score(references: References, name: str) -> tuple[str, Component]:
    """Return the key metric of a classification, and its name; its arguments are those of a handler."""
    key, content = _find_metric(references, name)
    target = str(content.get("_target_")) if isinstance(content, Mapping) else str(content)
    score = SCORES.get(target.rpartition(".")[2])
    if score is None:
        raise references.refuse(f"{name}::{key}", f"found {abbreviate(target)}; expected one of {', '.join(SCORES)}")
    return key, Component(score, {}, f"{references.source}: {name}::{key}")


def _read_preprocessing(references: References, name: str, loaded: Sequence[str]) -> tuple[Component, ...]:
    """Return transforms of image and label, LoadImaged first.

    A bundle without LoadImaged has arrays as data, which its cases become once their files are read.

    Args:
        references: items of the bundle.
        name: id of the item.
        loaded: keys of a case that are files.
    """
    transforms = read_transforms(references, name)
    for transform in transforms:
        keys = transform.args.get("keys", ())
        names = [keys] if isinstance(keys, str) else keys
        # The location starts with the name of the file.
        path = f"{transform.location.removeprefix(references.source + ': ')}::keys"
        allowed = loaded if transform.path == LOAD else KEYS
        with references.collect():
            if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
                raise references.refuse(path, "expected image, label, or a list of them")
            if other := sorted(set(names) - set(allowed)):
                held = "has the keys image and label" if allowed == KEYS else "has a file for image, and a class"
                raise references.refuse(path, f"found {other[0]!r}; a case {held}")
    loads = [transform.path == LOAD for transform in transforms]
    if not any(loads):
        return (Component(LOAD, {"keys": list(loaded)}, f"{references.source}: {name}"), *transforms)
    if not loads[0]:
        keys = " and ".join(loaded)
        raise references.refuse(name, f"expected LoadImaged as the first transform, with the keys {keys}")
    return transforms
