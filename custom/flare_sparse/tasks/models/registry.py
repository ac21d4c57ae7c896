"""Networks by name, and the ``model`` section of a task: a network and its settings, as ``{name: mlp, hidden: [64]}``.

A network's settings are validated against the annotations of its builder.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, create_model, model_validator
from torch import nn

from ...compute.structure.nodes import replace_batch_norms
from ...core.errors import ConfigError, suggest
from ...core.settings import Settings, explain
from .brain_age import alexnet3d, brain_age_cnn, brain_age_cnn_3mm, voxel_mlp
from .encoders import resnet3d, vit3d
from .gates import GateConfig, add_gates
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


def build_model(name: str, **settings: Any) -> nn.Module:
    """Build a network by name, newly initialised.

    Args:
        name: key of ``MODELS``.
        settings: keyword arguments of its builder.

    Raises:
        ConfigError: the network or a setting does not exist, a value is out of range, or the input is too small.
    """
    try:
        settings = validate_settings(name, settings)
        return MODELS[name](**settings)
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
        raise ValueError(f"model {name!r}: {explain(error, schema)}") from error


@cache
def _build_schema(name: str) -> type[BaseModel]:
    parameters = inspect.signature(MODELS[name], eval_str=True).parameters.values()
    fields: dict[str, Any] = {
        p.name: (p.annotation, ... if p.default is inspect.Parameter.empty else p.default) for p in parameters
    }
    return create_model(name, __config__=ConfigDict(extra="forbid", frozen=True), **fields)


FROM_TASK = (*INPUT_KINDS, "inputs", "outputs", "numbers")
OWN = ("name", "norm", "gates")
"""Settings that are not those of the network's builder."""


class ModelConfig(Settings):
    """A network and its settings, without the shape of its input and the number of outputs, which the task sets."""

    model_config = ConfigDict(extra="allow")

    name: str
    """name of a ready-made network"""
    norm: Literal["group"] | None = None
    """group: group normalisation in place of batch normalisation, as privacy needs it; null: as is"""
    gates: GateConfig | None = None
    """channel gates around some layers (MetaGater); null: none"""

    @model_validator(mode="before")
    @classmethod
    def _complete_settings(cls, value: Any) -> Any:
        """Validate the settings against the network's builder, fill in defaults, and convert them to JSON values."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return value
        name, network_settings = (value["name"], {key: setting for key, setting in value.items() if key not in OWN})
        if reserved := sorted(set(network_settings) & set(FROM_TASK)):
            raise ValueError(f"{reserved[0]!r} of a model is set by the task; remove it")
        # The number of features has no default and comes with the data; any value passes the check of the others.
        placeholder = {"features": 1} if name in MODELS and get_input_kind(name) == "features" else {}
        complete = validate_settings(name, {**placeholder, **network_settings})
        settings = {key: list(v) if isinstance(v, tuple) else v for key, v in complete.items() if key not in FROM_TASK}
        return {"name": name, **settings, **{key: value[key] for key in OWN[1:] if key in value}}

    def build(self, **task_settings: Any) -> nn.Module:
        """Build the network, newly initialised.

        Args:
            task_settings: input shape and outputs from the task, such as ``volume=(26, 32, 26), outputs=1``.

        Raises:
            ConfigError: the network does not take this kind of input, the input is too small, or a layer cannot be
                gated.
        """
        # Most networks of features do not distinguish numbers from categories.
        if "numbers" not in inspect.signature(MODELS[self.name]).parameters:
            task_settings.pop("numbers", None)
        network = build_model(self.name, **task_settings, **(self.model_extra or {}))
        if self.norm == "group" and not replace_batch_norms(network):
            raise ConfigError(f"model.norm: {self.name} has no batch normalisation; leave norm out")
        return network if self.gates is None else add_gates(network, self.gates)


def require_input(kind: str) -> AfterValidator:
    """Return a validator of a task's ``model`` that accepts only networks with this kind of input.

    Args:
        kind: ``volume``, ``image``, ``features`` or ``patch``.
    """

    def validate_kind(model: ModelConfig) -> ModelConfig:
        if get_input_kind(model.name) != kind:
            suitable = [name for name in MODELS if get_input_kind(name) == kind]
            raise ValueError(
                f"model {model.name!r} takes {get_input_kind(model.name)}, but this task provides {kind}; choose one "
                f"of: {', '.join(suitable)}.{suggest(model.name, suitable)}"
            )
        return model

    return AfterValidator(validate_kind)
