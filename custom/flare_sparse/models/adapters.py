"""LoRA adapters on any frozen network, by peft: linear layers and 3D convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from ..errors import ConfigError, suggest

if TYPE_CHECKING:
    from peft import PeftModel


class AdapterConfig(BaseModel):
    """Adapters ``(alpha / rank) * B A`` beside frozen weights; B starts at zero, so the start is the base itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(16, ge=1, le=4096, description="r_G: rank of every adapter")
    alpha: float = Field(16.0, gt=0, description="the product is scaled by alpha / rank")
    init: Literal["kaiming", "gaussian"] = Field("kaiming", description="how A is drawn: peft's default, or N(0, 1/r)")
    targets: tuple[str, ...] = Field(
        (), description="ends of the names of the modules to adapt, such as query; none: all that can be, but the head"
    )
    head: Literal["frozen", "trained"] = Field(
        "frozen", description="the last layer: as it is (FFA-LoRA, LoRA-A2), or trained and sent whole"
    )


def adaptable(network: nn.Module) -> list[str]:
    """Names of the linear layers and ungrouped 3D convolutions, in the network's order."""
    return [
        name
        for name, part in network.named_modules()
        if type(part) is nn.Linear or (type(part) is nn.Conv3d and part.groups == 1)
    ]


def adapt(network: nn.Module, config: AdapterConfig) -> PeftModel:
    """The network with adapters, as peft wraps it: everything else is frozen, the head by choice.

    Args:
        network: is changed. Its head is the last module that could be adapted.
        config: which modules, which rank. A is drawn from torch's global generator.

    Raises:
        ConfigError: no module fits, or peft is not installed.
    """
    peft = _peft()
    *body, head = adaptable(network) or [""]
    chosen = _chosen(body, config.targets) if config.targets else body
    if not chosen:
        raise ConfigError("task.adapter: the network has no linear layer or 3D convolution beside its head to adapt")
    settings: dict[str, Any] = {
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": chosen,
        "init_lora_weights": "gaussian" if config.init == "gaussian" else True,
        "modules_to_save": [head] if config.head == "trained" else None,
    }
    adapted: PeftModel = peft.get_peft_model(network, peft.LoraConfig(**settings))
    return adapted


def _chosen(body: list[str], targets: tuple[str, ...]) -> list[str]:
    """Modules that a target ends, as whole parts of their names."""
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in body):
            ends = sorted({name.rpartition(".")[2] for name in body})
            hint = suggest(target, ends) or f" There are, among others: {', '.join(ends[:8])}"
            raise ConfigError(f"task.adapter.targets: no module to adapt ends with {target!r}.{hint}")
    return [name for name in body if any(f".{name}".endswith(f".{target}") for target in targets)]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError("task.adapter needs peft; pip install 'flare-sparse[lora]'") from error
    return peft
