"""Components that a MONAI bundle may declare: an allow list of classes, and the construction of one of them.

None of the classes runs code that it is given, reads a file other than the site's own cases, or writes one. A name is
looked up in these tables and never imported as it was written.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import ConfigError, describe_exception, suggest
from .references import References

Kind = Literal["network", "loss", "metric", "classifier", "classification loss", "transform", "inferer"]


def _list_classes(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}.{name}" for name in names.split()}


CLASSES: dict[Kind, dict[str, str]] = {
    "network": _list_classes(
        "monai.networks.nets",
        "AttentionUnet BasicUNet BasicUNetPlusPlus DynUNet FlexibleUNet MedNeXt SegResNet SwinUNETR UNETR UNet VNet",
    ),
    "loss": {
        **_list_classes(
            "monai.losses",
            "DiceCELoss DiceFocalLoss DiceLoss FocalLoss GeneralizedDiceFocalLoss GeneralizedDiceLoss HausdorffDTLoss "
            "TverskyLoss",
        ),
        "CrossEntropyLoss": "torch.nn.CrossEntropyLoss",
    },
    "classifier": _list_classes(
        "monai.networks.nets",
        "DenseNet DenseNet121 DenseNet169 DenseNet201 DenseNet264 ResNet SENet154 SEResNet50 SEResNet101 SEResNet152 "
        "SEResNext50 SEResNext101",
    ),
    "classification loss": _list_classes("torch.nn", "BCEWithLogitsLoss CrossEntropyLoss"),
    "transform": _list_classes(
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
    "inferer": _list_classes("monai.inferers", "SimpleInferer SlidingWindowInferer"),
    # Handlers of MONAI's engines, by the metric that they compute.
    "metric": {
        "MeanDice": "monai.metrics.DiceMetric",
        "MeanIoUHandler": "monai.metrics.MeanIoU",
        "HausdorffDistance": "monai.metrics.HausdorffDistanceMetric",
        "SurfaceDistance": "monai.metrics.SurfaceDistanceMetric",
        **_list_classes("monai.metrics", "DiceMetric MeanIoU HausdorffDistanceMetric SurfaceDistanceMetric"),
    },
}
"""Import path of every class that a bundle may name, by kind and name."""
LOWER_IS_BETTER = ("monai.metrics.HausdorffDistanceMetric", "monai.metrics.SurfaceDistanceMetric")
OPTIMIZERS = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Novograd": "novograd"}
"""Optimiser of the package for each that a bundle may name."""
_READERS = (None, "NibabelReader", "ITKReader")
"""Readers of LoadImaged, all of them nibabel here; MONAI imports any other name, and NumPy's reader unpickles."""
_READER_ARGUMENTS = ("as_closest_canonical", "squeeze_non_spatial_dims")
"""Arguments of nibabel's reader that LoadImaged passes on."""
_FUNCTIONS = ("func", "select_fn", "other", "other_act", "norm_layer")
"""Arguments that MONAI calls."""
_PACKAGES = ("", "monai", "torch")
_RETIRED = {("SwinUNETR", "img_size"), ("UNETR", "proj_type")}
"""Arguments without effect that only older releases of MONAI take."""
_REASONS = {
    "DiNTS": "its architecture is read from a checkpoint by an expression with code ($torch.load); ",
    "Lambdad": "it calls a function of the bundle; ",
}


def is_known(target: str) -> bool:
    """Return whether a bundle may name a class, whatever for."""
    short = _shorten(target)
    return short in ("Compose", *OPTIMIZERS) or any(short in classes for classes in CLASSES.values())


def _shorten(target: str) -> str:
    """Return the name of a class without MONAI's or torch's package; of another package, the text as it is."""
    package, _, short = target.rpartition(".")
    return short if package.partition(".")[0] in _PACKAGES else target


@dataclass(frozen=True)
class Component:
    """One declared object.

    Attributes:
        path: import path of its class, from :data:`CLASSES`.
        args: arguments by name: numbers, text, lists and sections.
        location: file and item, for errors.
    """

    path: str
    args: Mapping[str, Any]
    location: str

    def build(self) -> Any:
        """Build the object.

        Raises:
            ConfigError: the class refuses an argument.
        """
        try:
            # MONAI warns of changed defaults, also where its own value is the default.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                # Where pydicom is installed, LoadImaged warns of a decoder of DICOM on GPUs.
                warnings.filterwarnings("ignore", "NvImgCodecPydicomReader", UserWarning)
                return import_class(self.path)(**self.args)
        # Which errors a constructor raises for a wrong value differs from class to class.
        except Exception as error:
            name = self.path.rpartition(".")[2]
            raise ConfigError(f"{self.location}: {name} cannot be built: {describe_exception(error)}") from error

    def find_argument(self, name: str) -> Any:
        """Return an argument as it is declared, or else its default; None where the class has neither."""
        if name in self.args:
            return self.args[name]
        parameter = list_parameters(self.path).get(name)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default


def build_all(components: Sequence[Component]) -> list[Any]:
    """Build some objects, in order."""
    return [component.build() for component in components]


def import_class(path: str) -> Any:
    """Return the class at an import path of :data:`CLASSES`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def list_parameters(path: str) -> dict[str, inspect.Parameter]:
    """Return the named parameters of a class, with those of its bases as far as it passes ``**kwargs`` on."""
    found: dict[str, inspect.Parameter] = {}
    for owner in inspect.getmro(import_class(path)):
        own = inspect.signature(owner).parameters.values()
        named = (p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        found = {**{p.name: p for p in named}, **found}
        if not any(p.kind is p.VAR_KEYWORD for p in own):
            break
    return found


def read_component(references: References, name: str, kind: Kind) -> Component:
    """Return the component at an item of a bundle.

    Raises:
        ConfigError: the item is no component, or its class is not on the allow list; the text names file and item.
    """
    return parse_component(references, references.resolve(name), name, kind)


def read_transforms(references: References, name: str) -> tuple[Component, ...]:
    """Return the transforms of an item, a ``Compose`` or a list, in order; those that are refused are left out.

    Raises:
        ConfigError: the item is no list of transforms.
    """
    return tuple(_parse_transforms(references, references.resolve(name), name))


def _parse_transforms(references: References, value: Any, name: str) -> Iterator[Component]:
    """Yield the transforms of a resolved value, a list or a ``Compose``, which may stand in each other."""
    while _is_compose(value):
        name, value = f"{name}::transforms", value.get("transforms")
    if not isinstance(value, list):
        raise references.refuse(name, "expected Compose with a list of transforms")
    for index, part in enumerate(value):
        with references.collect():
            if _is_compose(part):
                yield from _parse_transforms(references, part, f"{name}::{index}")
            else:
                yield parse_component(references, part, f"{name}::{index}", "transform")


def _is_compose(value: Any) -> bool:
    return isinstance(value, Mapping) and _shorten(str(value.get("_target_"))) == "Compose"


def parse_component(references: References, value: Any, name: str, kind: Kind) -> Component:
    """Return the component of a resolved value; ``name`` is its item, for errors.

    Raises:
        ConfigError: as :func:`read_component`, or the class takes no such argument.
    """
    target = value.get("_target_") if isinstance(value, Mapping) else None
    if not isinstance(target, str):
        raise references.refuse(name, f"expected a {kind} with _target_, such as {next(iter(CLASSES[kind]))}")
    short = _shorten(target)
    if short not in CLASSES[kind]:
        raise references.refuse(f"{name}::_target_", _explain_target(target, short, kind))
    path = CLASSES[kind][short]
    args = {key: part for key, part in value.items() if not key.startswith("_") and (short, key) not in _RETIRED}
    known = list(list_parameters(path))
    # What else RandZoomd is given goes to NumPy's padding; the readers of LoadImaged open files.
    is_open = short == "RandZoomd"
    known += _READER_ARGUMENTS if short == "LoadImaged" else ()
    for key, part in args.items():
        with references.collect():
            if _has_component(part):
                raise references.refuse(f"{name}::{key}", f"{short} takes no component here; give plain values")
            if key in _FUNCTIONS and part is not None:
                raise references.refuse(f"{name}::{key}", "a function cannot be given; remove it")
            if key not in known and not is_open:
                near = suggest(key, known)
                raise references.refuse(f"{name}::{key}", f"{short} has no such argument.{near} It has: {known}")
            if key == "pretrained" and part:
                raise references.refuse(f"{name}::{key}", "weights cannot be downloaded; set it to false")
    reader = args.pop("reader", None)
    if _shorten(str(reader)) not in map(str, _READERS):
        raise references.refuse(f"{name}::reader", f"found {reader!r}; expected NibabelReader, or leave it out")
    if set(args) & set(_READER_ARGUMENTS):
        # MONAI would try the arguments with each of its readers.
        args["reader"] = "NibabelReader"
    return Component(path, args, f"{references.source}: {name}")


def _explain_target(target: str, short: str, kind: Kind) -> str:
    """Return why a bundle may not name a class as its network, loss, and so on."""
    # A name without a package is MONAI's, as it is to MONAI itself.
    if "." in target and target.partition(".")[0] not in (*_PACKAGES, "ignite"):
        return f"found {target!r}, code of the bundle's own, which no site is sent; use a task of your own for it"
    names = sorted(CLASSES[kind])
    listed = "one of the transforms in docs/bundles.md" if kind == "transform" else f"one of {', '.join(names)}"
    return (
        f"found {target!r}; {_REASONS.get(short, '')}expected {listed}, or a task of your own.{suggest(short, names)}"
    )


def _has_component(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(_has_component(part) for part in value.values())
    return isinstance(value, list) and any(_has_component(part) for part in value)
