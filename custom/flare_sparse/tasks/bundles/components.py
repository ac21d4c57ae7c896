"""Components that a MONAI bundle may declare: an allow list of classes, and the construction of one of them.

None of the classes runs code that it is given, reads a file other than the site's own cases, or writes one. A name is
looked up in these tables and never imported as it was written.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import ConfigError, describe_exception, suggest
from .references import References

Kind = Literal["network", "loss", "transform", "inferer", "metric"]


def _list_classes(module: str, names: str) -> dict[str, str]:
    return {name: f"{module}.{name}" for name in names.split()}


CLASSES: dict[Kind, dict[str, str]] = {
    "network": _list_classes(
        "monai.networks.nets",
        "AttentionUnet BasicUNet BasicUNetPlusPlus DynUNet MedNeXt SegResNet SwinUNETR UNETR UNet VNet",
    ),
    "loss": {
        **_list_classes(
            "monai.losses",
            "DiceCELoss DiceFocalLoss DiceLoss FocalLoss GeneralizedDiceFocalLoss GeneralizedDiceLoss HausdorffDTLoss "
            "TverskyLoss",
        ),
        "CrossEntropyLoss": "torch.nn.CrossEntropyLoss",
    },
    "transform": _list_classes(
        "monai.transforms",
        "LoadImaged EnsureChannelFirstd EnsureTyped CastToTyped Orientationd Spacingd Resized Zoomd Flipd Rotate90d "
        "ScaleIntensityd ScaleIntensityRanged ScaleIntensityRangePercentilesd NormalizeIntensityd ThresholdIntensityd "
        "ClipIntensityPercentilesd AdjustContrastd HistogramNormalized GaussianSmoothd CropForegroundd "
        "CenterSpatialCropd SpatialCropd BorderPadd SpatialPadd DivisiblePadd ResizeWithPadOrCropd MapLabelValued "
        "ConvertToMultiChannelBasedOnBratsClassesd Activationsd AsDiscreted KeepLargestConnectedComponentd FillHolesd "
        "RemoveSmallObjectsd RandCropByPosNegLabeld RandCropByLabelClassesd RandSpatialCropd RandSpatialCropSamplesd "
        "RandFlipd RandAxisFlipd RandRotated RandRotate90d RandZoomd RandAffined Rand3DElasticd RandGaussianNoised "
        "RandGaussianSmoothd RandGaussianSharpend RandScaleIntensityd RandShiftIntensityd RandAdjustContrastd "
        "RandHistogramShiftd RandBiasFieldd RandCoarseDropoutd",
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
_READERS = (None, "NibabelReader", "monai.data.NibabelReader")
"""Readers of LoadImaged; MONAI imports any other name, and NumPy's reader unpickles."""
_FUNCTIONS = ("func", "select_fn", "other", "other_act", "norm_layer")
"""Arguments that MONAI calls."""


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
            ConfigError: the class takes no such argument, or refuses its value.
        """
        built_class, name = self._import_class(), self.path.rpartition(".")[2]
        parameters = inspect.signature(built_class).parameters.values()
        known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if unknown := sorted(set(self.args) - set(known)):
            near = suggest(unknown[0], known)
            raise ConfigError(f"{self.location}::{unknown[0]}: {name} has no such argument.{near} It has: {known}")
        try:
            # MONAI warns of changed defaults, also where its own value is the default.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return built_class(**self.args)
        # Which errors a constructor raises for a wrong value differs from class to class.
        except Exception as error:
            raise ConfigError(f"{self.location}: {name} cannot be built: {describe_exception(error)}") from error

    def find_argument(self, name: str) -> Any:
        """Return an argument as it is declared, or else its default; None where the class has neither."""
        if name in self.args:
            return self.args[name]
        parameter = inspect.signature(self._import_class()).parameters.get(name)
        return None if parameter is None or parameter.default is parameter.empty else parameter.default

    def _import_class(self) -> Any:
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


def read_component(references: References, name: str, kind: Kind) -> Component:
    """Return the component at an item of a bundle.

    Raises:
        ConfigError: the item is no component, or its class is not on the allow list; the text names file and item.
    """
    return parse_component(references, references.resolve(name), name, kind)


def read_transforms(references: References, name: str | None) -> tuple[Component, ...]:
    """Return the transforms of an item, a ``Compose`` or a list, in order; none without the item.

    Raises:
        ConfigError: as :func:`read_component`.
    """
    if name is None:
        return ()
    value = references.resolve(name)
    if isinstance(value, Mapping) and str(value.get("_target_")).rpartition(".")[2] == "Compose":
        name, value = f"{name}::transforms", value.get("transforms")
    if not isinstance(value, list):
        raise references.refuse(name, "expected Compose with a list of transforms")
    return tuple(parse_component(references, part, f"{name}::{index}", "transform") for index, part in enumerate(value))


def parse_component(references: References, value: Any, name: str, kind: Kind) -> Component:
    """Return the component of a resolved value; ``name`` is its item, for errors.

    Raises:
        ConfigError: as :func:`read_component`.
    """
    target = value.get("_target_") if isinstance(value, Mapping) else None
    if not isinstance(target, str):
        raise references.refuse(name, f"expected a {kind} with _target_, such as {next(iter(CLASSES[kind]))}")
    package, _, short = target.rpartition(".")
    if short not in CLASSES[kind] or package.partition(".")[0] not in ("", "monai", "torch"):
        raise references.refuse(
            f"{name}::_target_",
            f"found {target!r}; a bundle may name as its {kind}: {', '.join(sorted(CLASSES[kind]))}."
            f"{suggest(short, CLASSES[kind])} For any other class write a task of your own (docs/bundles.md)",
        )
    args = {key: part for key, part in value.items() if not key.startswith("_")}
    for key, part in args.items():
        if _has_component(part):
            raise references.refuse(f"{name}::{key}", f"{short} takes no component here; give plain values")
        if key in _FUNCTIONS and part is not None:
            raise references.refuse(f"{name}::{key}", "a function cannot be given; remove it")
    if args.get("reader") not in _READERS:
        raise references.refuse(f"{name}::reader", f"found {args['reader']!r}; expected NibabelReader, or leave it out")
    return Component(CLASSES[kind][short], args, f"{references.source}: {name}")


def _has_component(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(_has_component(part) for part in value.values())
    return isinstance(value, list) and any(_has_component(part) for part in value)
