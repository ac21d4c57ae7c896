"""The ``model`` section of a task: a network and its settings, such as ``{name: mlp, hidden: [64, 32]}``."""

from typing import Any, Literal

from pydantic import AfterValidator, ConfigDict, model_validator
from torch import nn

from ...compute.structure.nodes import replace_batch_norms
from ...core.errors import ConfigError, suggest
from ...core.settings import Settings
from .gates import GateConfig, add_gates
from .registry import INPUT_KINDS, MODELS, build_model, get_input_kind, takes_numbers, validate_settings

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
        settings = {key: _to_json(v) for key, v in complete.items() if key not in FROM_TASK}
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
        known = {key: value for key, value in task_settings.items() if key != "numbers" or takes_numbers(self.name)}
        network = build_model(self.name, **known, **(self.model_extra or {}))
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


def _to_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
