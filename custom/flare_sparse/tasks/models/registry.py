"""Registry of networks; a network's settings are validated against the annotations of its builder."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails
from torch import nn

from ...core.errors import ConfigError, suggest
from .brain_age import alexnet3d, brain_age_cnn, brain_age_cnn_3mm, voxel_mlp
from .encoders import resnet3d, vit3d
from .resnet import resnet32, resnet44, resnet56, resnet110
from .segmentation import basic_unet, dyn_unet, seg_resnet
from .small import image_cnn, image_cnn6, image_mlp, mlp, resnet_mlp

MODELS: dict[str, Callable[..., nn.Module]] = {
    "brain_age_cnn": brain_age_cnn,
    "brain_age_cnn_3mm": brain_age_cnn_3mm,
    "alexnet3d": alexnet3d,
    "resnet3d": resnet3d,
    "vit3d": vit3d,
    "voxel_mlp": voxel_mlp,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet56": resnet56,
    "resnet110": resnet110,
    "image_cnn": image_cnn,
    "image_cnn6": image_cnn6,
    "image_mlp": image_mlp,
    "mlp": mlp,
    "resnet_mlp": resnet_mlp,
    "basic_unet": basic_unet,
    "dyn_unet": dyn_unet,
    "seg_resnet": seg_resnet,
}
"""Builders by name.

They take the input shape (``volume``, ``image``, ``features`` or ``patch``), ``outputs`` and settings; those of patches
return outputs for every voxel and also take ``inputs``, the number of channels.
"""

INPUT_KINDS = ("volume", "image", "features", "patch")


def get_input_kind(name: str) -> str:
    """Return the kind of input that a network takes: ``volume``, ``image``, ``features`` or ``patch``."""
    return next(kind for kind in INPUT_KINDS if kind in inspect.signature(MODELS[name]).parameters)


def takes_numbers(name: str) -> bool:
    """Return whether a network asks which of its inputs are numbers."""
    return "numbers" in inspect.signature(MODELS[name]).parameters


def build_model(name: str, **settings: Any) -> nn.Module:
    """Build a network by name, newly initialised.

    Args:
        name: key of ``MODELS``.
        settings: keyword arguments of its builder.

    Raises:
        ConfigError: the network or a setting does not exist, a value is out of range, or the input is too small.
    """
    try:
        complete = validate_settings(name, settings)
        return MODELS[name](**complete)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def validate_settings(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all settings of a network with defaults filled in.

    Raises:
        ValueError: the network or a setting does not exist, or a value is out of range.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; choose one of: {', '.join(MODELS)}.{suggest(name, MODELS)}")
    schema = _build_schema(name)
    try:
        return dict(schema.model_validate(dict(settings)))
    except ValidationError as error:
        problems = [_describe_problem(schema, part) for part in error.errors(include_url=False)]
        raise ValueError(f"model {name!r}: " + "; ".join(problems)) from error


@cache
def _build_schema(name: str) -> type[BaseModel]:
    parameters = inspect.signature(MODELS[name], eval_str=True).parameters.values()
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is inspect.Parameter.empty else p.default) for p in parameters
    }
    return create_model(name, __config__=ConfigDict(extra="forbid", frozen=True), **fields)


def _describe_problem(schema: type[BaseModel], error: ErrorDetails) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        settings = list(schema.model_fields)
        return f"no setting {field!r}.{suggest(field, settings)} It has: {', '.join(settings)}"
    return f"{field}: {error['msg']}, found {error['input']!r}"
