"""Tasks that start from a pre-trained network, with adapters beside its frozen weights or as a whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import nn

from ..models.adapters import AdapterConfig, adapt
from ..models.base import BaseName, base_folder, drawn, load_base
from ..task import Task, TaskConfig


class AdaptationConfig(TaskConfig):
    """What the network starts from, and what of it is exchanged."""

    base: BaseName | None = Field(
        None, description="folder of pre-trained weights in $FLARE_SPARSE_MODELS; none: drawn at random"
    )
    base_seed: int = Field(
        0, ge=0, description="of what is drawn and frozen; equal at every end, whatever the run's seed"
    )
    adapter: AdapterConfig | None = Field(None, description="LoRA adapters; none: the whole network trains and travels")


class AdaptableTask(Task, ABC):
    """The network of a task as configured: fresh, pre-trained, or adapted."""

    config: AdaptationConfig

    @abstractmethod
    def network(self) -> nn.Module:
        """The architecture, freshly initialised."""

    def base(self) -> nn.Module:
        """The network that adapters are put on: pre-trained, or drawn from ``base_seed``.

        ``peft.PeftModel.from_pretrained(task.base(), folder)`` opens what :meth:`save` wrote.

        Raises:
            ConfigError: the base is not there or is of another network.
        """
        with drawn(self.config.base_seed):
            network = self.network()
        if self.config.base is not None:
            load_base(network, base_folder(self.config.base))
        return network

    def model(self) -> nn.Module:
        """The network to train; without base and adapter, drawn from torch's global generator."""
        if self.config.adapter is not None:
            adapted: nn.Module = adapt(self.base(), self.config.adapter)
            return adapted
        return self.network() if self.config.base is None else self.base()

    def save(self, model: nn.Module, folder: Path) -> None:
        """Adapters in peft's own format; a whole network as any other task saves it."""
        if self.config.adapter is None:
            super().save(model, folder)
        else:
            adapted: Any = model
            adapted.save_pretrained(folder)
