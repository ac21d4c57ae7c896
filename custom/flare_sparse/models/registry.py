"""The list of networks, and how settings for one are checked: by the annotations of its builder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails
from torch import nn

from ..errors import ConfigError, suggest
from .alexnet3d import alexnet3d
from .brain_age import brain_age_cnn, brain_age_cnn_3mm
from .resnet import resnet32, resnet44, resnet56, resnet110
from .small import image_cnn, image_cnn6, image_mlp, mlp

MODELS: dict[str, Callable[..., nn.Module]] = {
    "brain_age_cnn": brain_age_cnn,
    "brain_age_cnn_3mm": brain_age_cnn_3mm,
    "alexnet3d": alexnet3d,
    "resnet32": resnet32,
    "resnet44": resnet44,
    "resnet56": resnet56,
    "resnet110": resnet110,
    "image_cnn": image_cnn,
    "image_cnn6": image_cnn6,
    "image_mlp": image_mlp,
    "mlp": mlp,
}
"""A builder takes what the network reads (``volume``, ``image`` or ``features``), ``outputs``, and its own settings."""

READS = ("volume", "image", "features")


def reads(name: str) -> str:
    """What a network takes: ``volume``, ``image`` or ``features``."""
    return next(key for key in READS if key in inspect.signature(MODELS[name]).parameters)


def build(name: str, **settings: Any) -> nn.Module:
    """A network by name, freshly initialised.

    Args:
        name: key of ``MODELS``.
        settings: keyword settings of its builder.

    Raises:
        ConfigError: no such network or setting, a value out of range, or an input that is too small for the network.
    """
    try:
        return MODELS[name](**checked(name, settings)) if name in MODELS else _unknown(name)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def checked(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a network, defaults filled in.

    Raises:
        ValueError: no such network or setting, or a value out of range.
    """
    if name not in MODELS:
        _unknown(name)
    schema = _schema(name)
    try:
        return dict(schema.model_validate(dict(settings)))
    except ValidationError as error:
        problems = [_problem(schema, part) for part in error.errors(include_url=False)]
        raise ValueError(f"model {name!r}: " + "; ".join(problems)) from error


@cache
def _schema(name: str) -> type[BaseModel]:
    parameters = inspect.signature(MODELS[name], eval_str=True).parameters.values()
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is inspect.Parameter.empty else p.default) for p in parameters
    }
    return create_model(name, __config__=ConfigDict(extra="forbid", frozen=True), **fields)


def _problem(schema: type[BaseModel], error: ErrorDetails) -> str:
    field = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        known = list(schema.model_fields)
        return f"no setting {field!r}.{suggest(field, known)} It has: {', '.join(known)}"
    return f"{field}: {error['msg']}, found {error['input']!r}"


def _unknown(name: str) -> Any:
    raise ValueError(f"no model {name!r}; choose one of: {', '.join(MODELS)}.{suggest(name, MODELS)}")
