"""Components that a job may declare for a MONAI bundle: an allow list of classes, and the construction of one of them.

None of the classes runs code that it is given, reads a file other than the site's own cases, or writes one. A name is
looked up in these tables and never imported as it was written; classes of the bundle's own code come in as classes.
"""

import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from ...core.errors import ConfigError, abbreviate, describe_exception, suggest

Kind = Literal["network", "loss", "metric", "classifier", "classification loss", "transform", "inferer", "part"]


def _build_paths(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}.{name}" for name in names.split()}


CLASSES: dict[Kind, dict[str, str]] = {
    "network": _build_paths(
        "monai.networks.nets",
        "AttentionUnet BasicUNet BasicUNetPlusPlus DiNTS DynUNet FlexibleUNet MedNeXt SegResNet SwinUNETR UNETR UNet "
        "VNet",
    ),
    "loss": {
        **_build_paths(
            "monai.losses",
            "DiceCELoss DiceFocalLoss DiceLoss FocalLoss GeneralizedDiceFocalLoss GeneralizedDiceLoss HausdorffDTLoss "
            "TverskyLoss",
        ),
        "CrossEntropyLoss": "torch.nn.CrossEntropyLoss",
    },
    "classifier": _build_paths(
        "monai.networks.nets",
        "DenseNet DenseNet121 DenseNet169 DenseNet201 DenseNet264 ResNet SENet154 SEResNet50 SEResNet101 SEResNet152 "
        "SEResNext50 SEResNext101",
    ),
    "classification loss": _build_paths("torch.nn", "BCEWithLogitsLoss CrossEntropyLoss"),
    "transform": _build_paths(
        "monai.transforms",
        "LoadImaged EnsureChannelFirstd EnsureTyped CastToTyped ToTensord Orientationd Spacingd Resized Zoomd Flipd "
        "Rotate90d ScaleIntensityd ScaleIntensityRanged ScaleIntensityRangePercentilesd NormalizeIntensityd "
        "ThresholdIntensityd ClipIntensityPercentilesd AdjustContrastd HistogramNormalized GaussianSmoothd "
        "CropForegroundd CenterSpatialCropd SpatialCropd BorderPadd SpatialPadd DivisiblePadd ResizeWithPadOrCropd "
        "MapLabelValued ConvertToMultiChannelBasedOnBratsClassesd Activationsd AsDiscreted SplitDimd "
        "KeepLargestConnectedComponentd FillHolesd RemoveSmallObjectsd RandCropByPosNegLabeld RandCropByLabelClassesd "
        "RandSpatialCropd RandSpatialCropSamplesd RandFlipd RandAxisFlipd RandRotated RandRotate90d RandZoomd "
        "RandAffined Rand3DElasticd RandGaussianNoised RandGaussianSmoothd RandGaussianSharpend RandScaleIntensityd "
        "RandShiftIntensityd RandAdjustContrastd RandHistogramShiftd RandBiasFieldd RandCoarseDropoutd "
        "RandSmoothDeformd RandSmoothFieldAdjustContrastd RandSmoothFieldAdjustIntensityd",
    ),
    "inferer": _build_paths("monai.inferers", "SimpleInferer SlidingWindowInferer"),
    # Arguments of a network: the space of DiNTS, and the arrays that fix its architecture.
    "part": {"TopologyInstance": "monai.networks.nets.TopologyInstance", "numpy.array": "numpy.array"},
    # Handlers of MONAI's engines, by the metric that they compute.
    "metric": {
        "MeanDice": "monai.metrics.DiceMetric",
        "MeanIoUHandler": "monai.metrics.MeanIoU",
        **_build_paths("monai.metrics", "DiceMetric MeanIoU"),
    },
}
"""Import path of every class that a bundle may name, by kind and name."""
OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Novograd": "novograd"}
"""Optimiser of the package for each that a bundle may name."""
MAX_NUMBER = 1_000_000
"""Largest size, count or kernel; the networks of the package have the same limit."""
MAX_DEPTH = 16
"""Most levels of nested values."""
DTYPES: dict[str, Any] = {
    f"{module.__name__}.{name}": getattr(module, "bool_" if module is np and name == "bool" else name)
    for module in (np, torch)
    for name in ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"]
}
"""Number formats by the text that stands for them in a declaration."""
_READERS = (None, "NibabelReader", "ITKReader")
"""Readers of LoadImaged, all of them nibabel here; MONAI imports any other name, and NumPy's reader unpickles."""
_READER_ARGUMENTS = ("as_closest_canonical", "squeeze_non_spatial_dims")
"""Arguments of nibabel's reader that LoadImaged passes on."""
_FUNCTIONS = ("func", "select_fn", "other", "other_act", "norm_layer")
"""Arguments that MONAI calls."""
_PACKAGES = ("", "monai", "torch")
_RETIRED = {("SwinUNETR", "img_size"), ("UNETR", "proj_type")}
"""Arguments without effect that only older releases of MONAI take."""


class Refusal(ConfigError):
    """An item of a bundle that cannot be used.

    Args:
        source: where the item stands.
        path: its id.
        problem: what is wrong with it, and the remedy.
    """

    def __init__(self, source: str, path: str, problem: str):
        super().__init__(f"{source}: {path}: {problem}")
        self.path, self.problem = path, problem


def is_known(target: str) -> bool:
    """Return whether a bundle may name a class without any code of its own, whatever for."""
    return any(shorten(target) in classes for classes in CLASSES.values())


def shorten(target: str) -> str:
    """Return the name of a class without MONAI's or torch's package; of another package, the text as it is."""
    package, _, short = target.rpartition(".")
    return short if package.partition(".")[0] in _PACKAGES else target


@dataclass(frozen=True)
class Component:
    """One declared object.

    Attributes:
        path: import path of its class, from :data:`CLASSES` or of the bundle's own code.
        args: arguments by name: numbers, text, lists, sections, and for networks further components.
        location: file and item, for errors.
        own: class of the bundle's own code; None: the class is that at ``path``.
    """

    path: str
    args: Mapping[str, Any]
    location: str
    own: Any = field(default=None, compare=False)

    def build(self) -> Any:
        """Build the object.

        Raises:
            ConfigError: the class refuses an argument.
        """
        args = {name: _build_value(value) for name, value in self.args.items()}
        try:
            # MONAI warns of changed defaults, also where its own value is the default.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                # Where pydicom is installed, LoadImaged warns of a decoder of DICOM on GPUs.
                warnings.filterwarnings("ignore", "NvImgCodecPydicomReader", UserWarning)
                return (self.own or import_class(self.path))(**args)
        # Which errors a constructor raises for a wrong value differs from class to class.
        except Exception as error:
            name = self.path.rpartition(".")[2]
            raise ConfigError(f"{self.location}: {name} cannot be built: {describe_exception(error)}") from error

    def find_argument(self, name: str) -> Any:
        """Return an argument as it is declared, or else its default; None where the class has neither."""
        if name in self.args or self.path not in _PATHS:
            return self.args.get(name)
        parameter = find_parameters(self.path).get(name)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default


_PATHS = {path for classes in CLASSES.values() for path in classes.values()}


def _build_value(value: Any) -> Any:
    """Return an argument with its components built and its number formats found."""
    if isinstance(value, Component):
        return value.build()
    if isinstance(value, str):
        return DTYPES.get(value, value)
    if isinstance(value, list):
        return [_build_value(part) for part in value]
    return {key: _build_value(part) for key, part in value.items()} if isinstance(value, dict) else value


def iterate_components(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the sections of plain values that name a class, at any depth."""
    if isinstance(value, Mapping):
        if isinstance(value.get("_target_"), str):
            yield value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from iterate_components(part)


def build_all(components: Sequence[Component]) -> list[Any]:
    """Build some objects, in order."""
    return [component.build() for component in components]


def import_class(path: str) -> Any:
    """Return the class at an import path of :data:`CLASSES`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def find_parameters(path: str) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a class, with those of its bases as far as it passes ``**kwargs`` on."""
    if path == CLASSES["part"]["numpy.array"]:
        return {"object": inspect.Parameter("object", inspect.Parameter.POSITIONAL_OR_KEYWORD)}
    found: dict[str, inspect.Parameter] = {}
    for owner in inspect.getmro(import_class(path)):
        own = inspect.signature(owner).parameters.values()
        named = (p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        found = {**{p.name: p for p in named}, **found}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


def parse_component(
    source: str, value: Any, name: str, kind: Kind, own: Mapping[str, Any], depth: int = 0
) -> Component:
    """Return the component of a section with ``_target_``.

    Args:
        source: where it stands, for errors.
        value: the section: plain values.
        name: its item, for errors.
        kind: what it has to be.
        own: classes of the bundle's own code by their names; None instead of a class that is not there yet.
        depth: levels above it.

    Raises:
        Refusal: it is no component, its class is neither on the allow list nor the bundle's own, or an argument cannot
            be used.
    """
    target = value.get("_target_") if isinstance(value, Mapping) else None
    if not isinstance(target, str):
        raise Refusal(source, name, f"expected a {kind} with _target_, such as {next(iter(CLASSES[kind]))}")
    short = shorten(target)
    args: dict[str, Any] = {}
    for key, part in value.items():
        if key != "_target_" and (short, key) not in _RETIRED:
            args[key] = _parse_value(source, part, f"{name}::{key}", kind, own, depth + 1)
    if target in own:
        return Component(target, args, f"{source}: {name}", own[target])
    if short not in CLASSES[kind]:
        raise Refusal(source, f"{name}::_target_", _explain_target(target, short, kind))
    _check_arguments(source, CLASSES[kind][short], short, args, name)
    return Component(CLASSES[kind][short], args, f"{source}: {name}")


def _check_arguments(source: str, path: str, short: str, args: dict[str, Any], name: str) -> None:
    """Check the arguments of a class on the allow list, and choose the reader of ``LoadImaged`` among them.

    Raises:
        Refusal: the class has no such argument, or its value is none that is allowed.
    """
    known = list(find_parameters(path))
    # What else RandZoomd is given goes to NumPy's padding; the readers of LoadImaged open files.
    is_open = short == "RandZoomd"
    known += _READER_ARGUMENTS if short == "LoadImaged" else ()
    for key, part in args.items():
        if key in _FUNCTIONS and part is not None:
            raise Refusal(source, f"{name}::{key}", "a function cannot be given; remove it")
        if key not in known and not is_open:
            near = suggest(key, known)
            raise Refusal(source, f"{name}::{key}", f"{short} has no such argument.{near} It has: {known}")
        if key == "pretrained" and part:
            raise Refusal(source, f"{name}::{key}", "weights cannot be downloaded; set it to false")
    reader = args.pop("reader", None)
    if shorten(str(reader)) not in map(str, _READERS):
        raise Refusal(source, f"{name}::reader", f"found {reader!r}; expected NibabelReader, or leave it out")
    if set(args) & set(_READER_ARGUMENTS):
        # MONAI would try the arguments with each of its readers.
        args["reader"] = "NibabelReader"


def _parse_value(source: str, value: Any, name: str, kind: Kind, own: Mapping[str, Any], depth: int) -> Any:
    """Return an argument whose components are parsed.

    Raises:
        Refusal: it is no plain value, too deep, out of range, or a component that the class takes none of.
    """
    problem = ""
    if depth > MAX_DEPTH:
        problem = f"it lies below more than {MAX_DEPTH} levels"
    elif isinstance(value, Mapping) and "_target_" in value:
        if kind in ("network", "classifier", "part"):
            return parse_component(source, value, name, "part", own, depth)
        problem = f"a {kind} takes no component here; give plain values"
    elif isinstance(value, Mapping) and all(isinstance(key, str) and not key.startswith("_") for key in value):
        pairs = value.items()
        return {k: _parse_value(source, part, f"{name}::{k}", kind, own, depth + 1) for k, part in pairs}
    elif isinstance(value, (list, tuple)):
        return [_parse_value(source, v, f"{name}::{i}", kind, own, depth + 1) for i, v in enumerate(value)]
    elif isinstance(value, str) and value[:1] in ("$", "@", "%"):
        problem = f"found {abbreviate(value)}, which only the lead resolves; a site evaluates no expression"
    elif isinstance(value, (int, float)) and not abs(value) <= MAX_NUMBER:
        problem = f"found {abbreviate(value)}; expected a number of at most {MAX_NUMBER:,}"
    elif not isinstance(value, (str, int, float, type(None))):
        problem = f"found {type(value).__name__}; expected a number, text, a list or a section"
    if problem:
        raise Refusal(source, name, problem)
    return value


def _explain_target(target: str, short: str, kind: Kind) -> str:
    """Return why a bundle may not name a class as its network, loss, and so on."""
    # A name without a package is MONAI's, as it is to MONAI itself.
    if "." in target and target.partition(".")[0] not in (*_PACKAGES, "ignite"):
        return (
            f"found {target!r}, which is neither on the list of allowed classes nor in the bundle's folder; replace "
            "it, or use a task of your own (docs/bundles.md)"
        )
    names = sorted(CLASSES[kind])
    listed = "one of the transforms in docs/bundles.md" if kind == "transform" else f"one of {', '.join(names)}"
    return f"found {target!r}; expected {listed}, or a task of your own.{suggest(short, names)}"
