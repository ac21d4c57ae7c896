"""What a job declares of a MONAI bundle: plain values that the lead resolved, from which each site builds the parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import ConfigError, abbreviate
from ..task import METRIC_NAMES, is_metric_name
from .components import CLASSES, Component, Kind, Refusal, parse_component

Purpose = Literal["segmentation", "classification"]
"""What a bundle is for: its labels are maps, or classes."""
KEYS = ("image", "label")
"""Names of a case's image and its label, a map or a class, after the deterministic transforms."""
SCORES = {"Accuracy": "accuracy", "ROCAUC": "auc", "ROCAUCMetric": "auc"}
"""Metrics of a classification over all cases, of MONAI's and Ignite's handlers."""
LOAD = CLASSES["transform"]["LoadImaged"]
BINARY_LOSS = CLASSES["classification loss"]["BCEWithLogitsLoss"]
PARTS = ("network", "loss", "preprocessing", "evaluation", "inferer", "postprocessing", "metric")
"""Keys of a declaration; ``evaluation`` and ``inferer`` may be missing, and ``postprocessing`` of a classification."""
_SIMPLE_INFERER = {"_target_": "SimpleInferer"}


@dataclass(frozen=True)
class Declaration:
    """The parts of a bundle.

    Attributes:
        purpose: what it is for.
        network: the network.
        loss: training loss of logits and labels.
        preprocessing: transforms of training cases, deterministic ones first; the first one loads the files.
        evaluation_preprocessing: transforms of all other cases, likewise.
        image_keys: names under which the transforms receive the files of a case's images.
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
    image_keys: tuple[str, ...]
    inferer: Component
    postprocessing: tuple[Component, ...]
    metric: Component
    metric_name: str

    @property
    def num_outputs(self) -> int | None:
        """Channels or logits of the network's output; None where the bundle does not say."""
        numbers = (self.network.find_argument(name) for name in ("out_channels", "num_classes"))
        return next((number for number in numbers if isinstance(number, int)), None)


def find_purpose(source: str, loss: str, metric: str) -> Purpose:
    """Return what a bundle is for, by the classes of its loss and its key metric.

    Args:
        source: where they stand, for errors.
        loss: name of the loss; empty: there is none.
        metric: likewise, of the first key metric.

    Raises:
        ConfigError: it is neither for segmentation nor for classification.
    """
    names = loss.rpartition(".")[2], metric.rpartition(".")[2]
    if "Dice" in loss or names[0] == "TverskyLoss" or names[1] in CLASSES["metric"]:
        return "segmentation"
    # Images are also classified where the key metric is one that is not read.
    if names[0] in CLASSES["classification loss"]:
        return "classification"
    raise ConfigError(
        f"{source}: this bundle neither segments nor classifies images: its loss is {loss or 'none'}, its key metric "
        f"{metric or 'none'}; expected those of a segmentation, such as DiceCELoss in loss or MeanDice in "
        "validate::key_metric, or of a classification, CrossEntropyLoss and Accuracy (docs/bundles.md)"
    )


def read_declaration(parts: Mapping[str, Any], source: str, own: Mapping[str, Any]) -> Declaration:
    """Read the parts of a bundle.

    Nothing in them is evaluated or imported by a name of theirs: whatever sends a job may have written them.

    Args:
        parts: plain values by :data:`PARTS`.
        source: where they stand, for errors.
        own: classes of the bundle's own code by their names; None instead of one that is not there yet.

    Raises:
        ConfigError: the bundle neither segments nor classifies; or a part is missing, its class is not allowed, or it
            is no plain value: the text names item and remedy.
    """
    purpose = find_purpose(source, get_target(parts.get("loss")), get_target(_get_metric(parts.get("metric"))))
    segments = purpose == "segmentation"
    if unknown := sorted(set(parts) - set(PARTS)):
        raise Refusal(source, unknown[0], f"expected one of {', '.join(PARTS)}")

    def read(part: str, kind: Kind) -> Component:
        return parse_component(source, given[part], part, kind, own)

    # No transform of a classification's predictions is read.
    given = {"inferer": _SIMPLE_INFERER, "evaluation": (), **parts} | ({} if segments else {"postprocessing": ()})
    if missing := [part for part in PARTS if given.get(part) is None]:
        text = f"missing; add this item, from which the job reads the bundle's {missing[0]}"
        raise Refusal(source, missing[0], text)
    network = read("network", "network" if segments else "classifier")
    loss = read("loss", "loss" if segments else "classification loss")
    preprocessing, evaluation, postprocessing = (
        _read_transforms(source, given[part], part, own) for part in ("preprocessing", "evaluation", "postprocessing")
    )
    preprocessing, keys = _insert_load(source, preprocessing, "preprocessing", segments, ())
    if evaluation:
        evaluation, _ = _insert_load(source, evaluation, "evaluation", segments, keys)
    metric_name, metric = _read_metric(source, given["metric"], segments)
    declaration = Declaration(
        purpose,
        network,
        loss,
        preprocessing,
        evaluation or preprocessing,
        keys,
        read("inferer", "inferer"),
        postprocessing,
        metric,
        metric_name,
    )
    outputs, is_binary = declaration.num_outputs, loss.path == BINARY_LOSS
    if not segments and (outputs is None or (outputs == 1) is not is_binary):
        expected = "1, because BCEWithLogitsLoss has two classes" if is_binary else "2 or more, one for each class"
        raise ConfigError(f"{network.location}: the network has {outputs} outputs; expected {expected}")
    return declaration


def get_target(value: Any) -> str:
    """Return the class of a section as it is written; empty: it names none."""
    return str(value.get("_target_", "")) if isinstance(value, Mapping) else ""


def _get_metric(value: Any) -> Any:
    """Return the first metric of a section of metrics by their names; None: there is none."""
    return next(iter(value.values()), None) if isinstance(value, Mapping) else None


def _read_transforms(source: str, value: Any, part: str, own: Mapping[str, Any]) -> tuple[Component, ...]:
    """Return the transforms of a list, in order.

    Raises:
        Refusal: it is no list, or a transform cannot be used.
    """
    if not isinstance(value, (list, tuple)):
        raise Refusal(source, part, "expected Compose with a list of transforms")
    return tuple(parse_component(source, v, f"{part}::{i}", "transform", own) for i, v in enumerate(value))


def _read_metric(source: str, value: Any, segments: bool) -> tuple[str, Component]:
    """Return the name of the key metric, and the metric.

    Raises:
        Refusal: there is none, or it is none of the known ones.
    """
    if not isinstance(value, Mapping) or len(value) != 1 or "_target_" in value:
        raise Refusal(source, "metric", 'expected a section with one metric, such as {"val_mean_dice": {...}}')
    name, content = next(iter(value.items()))
    if not is_metric_name(name):
        raise Refusal(source, "metric", f"found the name {abbreviate(name)} of a metric; expected {METRIC_NAMES}")
    item = f"metric::{name}"
    if segments:
        component = parse_component(source, content, item, "metric", {})
        # The handlers' default is MONAI's; a case has no mean over a batch.
        args = {option: part for option, part in component.args.items() if option not in ("reduction", "get_not_nans")}
        return name, Component(component.path, args, component.location)
    target = get_target(content)
    score = SCORES.get(target.rpartition(".")[2])
    if score is None:
        raise Refusal(source, item, f"found {abbreviate(target)}; expected one of {', '.join(SCORES)}")
    return name, Component(score, {}, f"{source}: {item}")


def _insert_load(
    source: str, transforms: tuple[Component, ...], part: str, segments: bool, keys: tuple[str, ...]
) -> tuple[tuple[Component, ...], tuple[str, ...]]:
    """Return transforms of cases, LoadImaged first, and the names under which they receive the files of images.

    A bundle without LoadImaged has arrays as data, which its cases become once their files are read.

    Args:
        source: where they stand, for errors.
        transforms: those of the bundle.
        part: their part.
        segments: whether the labels are files, too.
        keys: the names that the transforms of training cases receive; none: these are they.

    Raises:
        Refusal: another transform is the first, or LoadImaged loads no image, no label map or other files.
    """
    loads = [transform for transform in transforms if transform.path == LOAD]
    files: list[str] = []
    for load in loads:
        given = load.args.get("keys")
        given = [given] if isinstance(given, str) else given
        if not isinstance(given, list) or not all(isinstance(name, str) for name in given):
            path = f"{part}::{transforms.index(load)}::keys"
            raise Refusal(source, path, f"expected {', '.join(KEYS)}, or a list of such names")
        files += [name for name in given if name not in files]
    if not loads:
        files = list(KEYS if segments else KEYS[:1])
    if loads and transforms[0] is not loads[0]:
        raise Refusal(source, part, f"expected LoadImaged as the first transform, with the keys {', '.join(files)}")
    images = tuple(name for name in files if name != KEYS[1])
    if not images or (KEYS[1] in files) is not segments or (keys and images != keys):
        held = "image and label" if segments else "image alone: the label is a class"
        raise Refusal(source, part, f"LoadImaged loads {', '.join(files)}; expected the same files everywhere, {held}")
    if loads:
        return transforms, images
    return (Component(LOAD, {"keys": files}, f"{source}: {part}"), *transforms), images
