"""LoRA adapters of peft for linear layers and 3D convolutions of any frozen network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from torch import nn

from ...core.errors import ConfigError, list_first, require_extra, suggest
from ...core.settings import Settings

if TYPE_CHECKING:
    from peft import PeftModel


SITE_ADAPTER = "site"
"""Name of the adapters that stay at a site."""


class AdapterConfig(Settings):
    """Adapters ``(alpha / rank) * B A`` beside frozen weights; B starts at 0, so training starts at the base model."""

    rank: int = Field(16, ge=1, le=4096)
    """r_G: rank of every adapter"""
    alpha: float = Field(16.0, gt=0)
    """the product is scaled by alpha / rank"""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """initialisation of A: peft's default, or N(0, 1/r)"""
    site_rank: int = Field(0, ge=0, le=4096)
    """rank of a second adapter beside each one, which stays at the site (dual LoRA); needs method.personal: site; 0:
    none"""
    targets: tuple[str, ...] = ()
    """last parts of the names of the modules to adapt, such as query; none: all but the head"""
    head: Literal["frozen", "trained"] = "frozen"
    """the last layer: frozen (FFA-LoRA, LoRA-A2), or trained and sent in full"""


def list_adaptable_modules(network: nn.Module) -> list[str]:
    """Return the names of the linear layers and ungrouped 3D convolutions, in the network's order."""
    return [
        name
        for name, part in network.named_modules()
        if type(part) is nn.Linear or (type(part) is nn.Conv3d and part.groups == 1)
    ]


def add_adapters(network: nn.Module, config: AdapterConfig, new: Sequence[str] = ()) -> PeftModel:
    """Add adapters to a network; everything else is frozen, except new tensors, and the head if ``config`` trains it.

    Args:
        network: the base model; it is modified. Its head is the last module that could have an adapter.
        config: modules, rank and scale of the adapters. A is drawn from torch's global generator.
        new: names of parameters that no file has: they are trained and sent in full, without adapters.

    Returns:
        The network as peft wraps it.

    Raises:
        ConfigError: no module matches the targets, a new tensor cannot be trained alone, or peft is not installed.
    """
    with require_extra("task.adapter", "lora"):
        import peft
    *body, head = list_adaptable_modules(network) or [""]
    saved = {name.rpartition(".")[0] for name in new} | ({head} if config.head == "trained" else set())
    body = [name for name in body if name not in saved]
    expected = {name for name, _ in network.named_parameters() if name.rpartition(".")[0] in saved}
    targets = _select_modules(body, config.targets) if config.targets else body
    if not targets:
        raise ConfigError("task.adapter: the network has no linear layer or 3D convolution beside its head to adapt")
    start = True if config.init == "kaiming" else config.init
    settings: dict[str, Any] = {"lora_alpha": config.alpha, "target_modules": targets, "init_lora_weights": start}
    adapter = peft.LoraConfig(r=config.rank, modules_to_save=sorted(saved) or None, **settings)
    adapted: PeftModel = peft.get_peft_model(network, adapter)
    # peft takes whole modules, and all whose names end as asked.
    if other := sorted(_list_saved(adapted) ^ expected):
        raise ConfigError(
            f"task.base.new: cannot be trained beside adapters without others: {list_first(other, 5)}; leave "
            "task.adapter out to train the whole network"
        )
    if config.site_rank:
        adapted.add_adapter(SITE_ADAPTER, peft.LoraConfig(r=config.site_rank, **settings))
        # Both add to the output of a layer; peft's own method for a whole model activates one.
        adapted.base_model.set_adapter(["default", SITE_ADAPTER])
        for part in adapted.modules():
            if isinstance(part, peft.tuners.lora.LoraLayer):
                part.site_tensors = tuple(f"lora_{factor}.{SITE_ADAPTER}.weight" for factor in "AB")
    return adapted


def _list_saved(adapted: PeftModel) -> set[str]:
    """Return the names, in the network without adapters, of the parameters that are trained in full."""
    return {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad and ".modules_to_save." in name
    }


def _select_modules(body: list[str], targets: tuple[str, ...]) -> list[str]:
    """Return the modules whose names end with a target; the target matches whole parts between dots."""
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in body):
            ends = sorted({name.rpartition(".")[2] for name in body})
            hint = suggest(target, ends) or f" Available are, among others: {', '.join(ends[:8])}"
            raise ConfigError(f"task.adapter.targets: no module to adapt ends with {target!r}.{hint}")
    return [name for name in body if any(f".{name}".endswith(f".{target}") for target in targets)]
