"""The section ``model`` of a task: a network and its settings, such as ``{name: mlp, hidden: [64, 32]}``."""

from __future__ import annotations

from typing import Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from torch import nn

from ..errors import suggest
from .gates import GateConfig, gated
from .registry import MODELS, READS, build, checked, reads

FROM_TASK = (*READS, "outputs")


class ModelConfig(BaseModel):
    """A network and its own settings. What it reads and its outputs are not among them: the task gives those."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(description="one of the ready networks")
    gates: GateConfig | None = Field(None, description="channel gates around some layers (MetaGater); null: none")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        """Settings checked by the network's builder, defaults filled in, as plain JSON values."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return value
        name, own = value["name"], {key: given for key, given in value.items() if key not in ("name", "gates")}
        if given := sorted(set(own) & set(FROM_TASK)):
            raise ValueError(f"{given[0]!r} of a model is given by the task; leave it out")
        placeholder = {"features": 1} if name in MODELS and reads(name) == "features" else {}
        everything = checked(name, {**placeholder, **own})
        settings = {key: _plain(v) for key, v in everything.items() if key not in FROM_TASK}
        return {"name": name, **settings, **({"gates": value["gates"]} if "gates" in value else {})}

    @model_serializer(mode="wrap")
    def _without_empty(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A network without gates is written as it was before there were any."""
        return {key: value for key, value in dump(self).items() if key != "gates" or value is not None}

    def build(self, **given: Any) -> nn.Module:
        """The network, freshly initialised.

        Args:
            given: by the task, such as ``volume=(26, 32, 26), outputs=1``.

        Raises:
            ConfigError: the network does not read what is given, it is too small, or it cannot be gated like this.
        """
        network = build(self.name, **given, **(self.model_extra or {}))
        return network if self.gates is None else gated(network, self.gates)


def reading(kind: str) -> AfterValidator:
    """Validator of a task's ``model``: only networks that read ``kind`` (``volume``, ``image`` or ``features``)."""

    def fits(model: ModelConfig) -> ModelConfig:
        if reads(model.name) != kind:
            fitting = [name for name in MODELS if reads(name) == kind]
            raise ValueError(
                f"model {model.name!r} reads {reads(model.name)}, this task gives {kind}; choose one of: "
                f"{', '.join(fitting)}.{suggest(model.name, fitting)}"
            )
        return model

    return AfterValidator(fits)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
