"""What a MONAI bundle declares: the parts of ``configs/train.json`` that a federated job needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.errors import ConfigError, abbreviate
from ..task import METRIC_NAMES, Metric, is_metric_name
from .components import LOWER_IS_BETTER, Component, parse_component, read_component, read_transforms
from .references import References

KEYS = ("image", "label")
"""Names of a case's image and label map in the transforms."""
TRAIN = "train"
"""Name of the file with the training configuration, without its extension."""
_OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw"}
_SETTINGS = {"lr": "lr", "weight_decay": "weight_decay", "momentum": "momentum"}


@dataclass(frozen=True)
class Declaration:
    """The parts of a bundle.

    Attributes:
        network: the network.
        loss: training loss of logits and label maps.
        preprocessing: transforms of training cases, deterministic ones first.
        evaluation_preprocessing: transforms of all other cases.
        inferer: how a whole volume is predicted.
        postprocessing: transforms of logits and label map before the metric.
        metric: the metric of a case.
        metric_name: its name.
    """

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
    if len(files) != 1:
        raise ConfigError(
            f"configs/ of the bundle has {len(files)} files train.json, train.yaml or train.yml; expected one"
        )
    return files[0]


def read_declaration(content: Mapping[str, Any], source: str) -> Declaration:
    """Read the declared parts of a training configuration.

    Args:
        content: the parsed file.
        source: name of the file, for errors.

    Raises:
        ConfigError: a part is missing, its class is not allowed, or it needs code; the text names file and item.
    """
    references = References(content, source)

    def require(what: str, *ids: str) -> str:
        name = references.find(*ids)
        if name is None:
            raise references.refuse(ids[0], f"missing; add this item, from which the job reads {what}")
        return name

    preprocessing = require("the transforms of the training cases", "train::preprocessing", "train::dataset::transform")
    evaluation = references.find("validate::preprocessing", "validate::dataset::transform") or preprocessing
    postprocessing = require(
        "the transforms that turn the network's output into predictions",
        "validate::postprocessing",
        "validate::evaluator::postprocessing",
    )
    inferer = references.find("validate::inferer", "validate::evaluator::inferer")
    metric_name, metric = _read_metric(
        references, require("the key metric", "validate::key_metric", "validate::evaluator::key_val_metric")
    )
    source_of_inferer = references if inferer else References({"inferer": {"_target_": "SimpleInferer"}}, source)
    return Declaration(
        read_component(references, require("the network", "network_def", "network", "net"), "network"),
        read_component(
            references, require("the loss", "loss", "loss_function", "train::trainer::loss_function"), "loss"
        ),
        _read_preprocessing(references, preprocessing),
        _read_preprocessing(references, evaluation),
        read_component(source_of_inferer, inferer or "inferer", "inferer"),
        read_transforms(references, postprocessing),
        metric,
        metric_name,
    )


def read_training(content: Mapping[str, Any], source: str, *, with_optimizer: bool = True) -> dict[str, Any]:
    """Return the settings of ``method.training`` that a bundle declares: optimiser and batch size.

    Args:
        content: the parsed file.
        source: name of the file, for errors.
        with_optimizer: whether to read the optimiser.

    Raises:
        ConfigError: the optimiser is none of the package's; the text names file and item.
    """
    references = References(content, source)
    settings: dict[str, Any] = {}
    if name := references.find("train::dataloader::batch_size"):
        settings["batch_size"] = references.resolve(name)
    name = references.find("optimizer", "train::trainer::optimizer")
    if name is None or not with_optimizer:
        return settings
    value = references.resolve(name)
    target = str(value.get("_target_")) if isinstance(value, Mapping) else ""
    kind = _OPTIMIZERS.get(target.rpartition(".")[2])
    if kind is None or not isinstance(value, Mapping):
        raise references.refuse(
            name, f"found {target!r}; expected torch.optim.Adam, AdamW or SGD, or set method.training.optimizer"
        )
    for key, part in value.items():
        if key in _SETTINGS:
            settings[_SETTINGS[key]] = part
        elif not key.startswith("_"):
            raise references.refuse(f"{name}::{key}", "not supported; remove it, or set method.training.optimizer")
    return {**settings, "optimizer": kind}


def _read_metric(references: References, name: str) -> tuple[str, Component]:
    """Return the first metric of an item, and its name."""
    value = references.resolve(name)
    if not isinstance(value, Mapping) or not value or "_target_" in value:
        raise references.refuse(name, 'expected a section with one metric, such as {"val_mean_dice": {...}}')
    key, content = next(iter(value.items()))
    if not is_metric_name(key):
        raise references.refuse(name, f"found the name {abbreviate(key)} of a metric; expected {METRIC_NAMES}")
    component = parse_component(references, content, f"{name}::{key}", "metric")
    # The handlers' default is MONAI's; a case has no mean over a batch.
    args = {option: part for option, part in component.args.items() if option not in ("reduction", "get_not_nans")}
    return key, Component(component.path, args, component.location)


def _read_preprocessing(references: References, name: str) -> tuple[Component, ...]:
    transforms = read_transforms(references, name)
    for transform in transforms:
        keys = transform.args.get("keys", ())
        names = [keys] if isinstance(keys, str) else keys
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ConfigError(f"{transform.location}::keys: expected image, label, or a list of them")
        if other := sorted(set(names) - set(KEYS)):
            raise ConfigError(f"{transform.location}::keys: found {other[0]!r}; a case has the keys image and label")
    if not transforms or transforms[0].path != "monai.transforms.LoadImaged":
        raise references.refuse(name, "expected LoadImaged as the first transform, with the keys image and label")
    return transforms
